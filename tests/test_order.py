"""Tests run in the order that a seed draws; those that a change touches are found."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests import order, touched


def test_a_seed_keeps_files_together_and_draws_the_rest() -> None:
    class Item:
        def __init__(self, path: str, name: str) -> None:
            self.path, self.nodeid = Path(path), f"{path}::{name}"

    def drawn(seed: str) -> list[str]:
        items = [Item(f"{file}.py", f"test_{number}") for file in "abcd" for number in range(6)]
        order.sort(items, seed)  # type: ignore[arg-type]
        return [item.nodeid for item in items]

    first = drawn("1")
    assert drawn("1") == first != drawn("2")
    files = [name.partition("::")[0] for name in first]
    assert len([a for a, b in itertools.pairwise(files) if a != b]) == 3, "a file's tests stay together"
    assert sorted(first) != first


def test_a_change_touches_the_tests_that_cover_it(request: pytest.FixtureRequest) -> None:
    assert touched.touches({"shardkit/oom/cap.py"}, {"shardkit/oom"})
    assert touched.touches({"setup.cfg"}, {"setup.cfg"})
    assert not touched.touches({"shardkit/oom_other.py", "docs/oom.md"}, {"shardkit/oom"})
    assert {"tests/test_order.py", "constraints.txt"} <= touched._covered(request.node)
    for path in (*touched.CARD, *touched.VERSIONS):
        assert (touched.REPO / path).exists(), path
