"""Saved under one strategy at one world size, loaded under another: the same state, the same losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkpoint import cases, matrix

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05}
"""bf16 losses of two strategies differ by the rounding of their sums; the state must not."""


def check(stages: Sequence[matrix.Stage], root: Path, mode: str) -> None:
    outcome = matrix.run(stages, root, [mode])
    wanted = {(source, target) for s in stages for target in s.targets for source in s.sources or [""]}
    assert {(pair.source, pair.target) for pair in outcome.pairs} == wanted
    for pair in outcome.pairs:
        assert not pair.differing, f"{pair}: not what was saved: {pair.differing}"
        assert outcome.distance(pair) <= TOLERANCE[mode], (
            f"{pair}: losses {pair.losses} instead of {outcome.uninterrupted(mode)}"
        )
    losses = outcome.uninterrupted(mode)
    assert losses[0] - losses[-1] > 0.1, "if nothing moves, a lost optimizer state shows nowhere"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode", [pytest.param("fp32", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.release)]
)
def test_every_strategy_to_another_and_on(mode: str, tmp_path: Path) -> None:
    stages = matrix.covering()
    assert {name for stage in stages for name in stage.names} == set(cases.CASES)
    check(stages, tmp_path, mode)


@pytest.mark.release
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_full_matrix(mode: str, tmp_path: Path) -> None:
    check(matrix.full(), tmp_path, mode)
