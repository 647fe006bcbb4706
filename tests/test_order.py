"""Tests run in the order that a seed draws; those that a change touches are found; runs of the suite are recorded."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests import order, repeated, touched


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


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("1 failed, 2775 passed, 251 skipped, 27 warnings in 1846.11s (0:30:46)", (2775, 1, 0, 251)),
        ("==== 3 passed, 1 error in 2.00s ====", (3, 0, 1, 0)),
        ("no tests ran in 0.01s", (0, 0, 0, 0)),
    ],
)
def test_the_outcomes_of_a_run_are_read(summary: str, expected: tuple[int, ...]) -> None:
    assert tuple(repeated.counts(summary).values()) == expected


def test_runs_are_recorded_with_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passing = f"{Path(__file__).name}::test_a_change_touches_the_tests_that_cover_it"
    monkeypatch.setattr(repeated, "WORKERS", (0,))
    assert repeated.main(["1", f"tests/{passing}"], tmp_path / "runs.jsonl") == 0
    (record,) = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert (record["passed"], record["failed"], record["workers"], record["exit_code"]) == (1, 0, 0, 0)
    assert record["seed"] >= 0 and record["seconds"] > 0, "of a run that takes less than half a second, too"
