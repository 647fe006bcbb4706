"""What holds for every test: it leaves nothing behind. And which tests stay together when `make test` runs several at a
time: those of a file, which share what it has set up, and those of Slurm, of which this machine has one cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.guard import MARK, nothing_left

# Workers side by side share the cores: two threads each would wait for one another at every operator.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ[MARK] = str(os.getpid())


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist one test runs after the other
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/slurm" if file.startswith("tests/slurm/") else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """Fails a test that leaves something behind (tests/guard.py)."""
    with nothing_left():
        yield
