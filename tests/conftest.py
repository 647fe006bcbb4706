"""Which tests stay together when `make test` runs several at a time: those of a file, which share what it has set up,
and those of Slurm, of which this machine has one cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        place = item.path.relative_to(TESTS)
        group = "slurm" if place.parts[0] == "slurm" else str(place)
        item.add_marker(pytest.mark.xdist_group(group))
