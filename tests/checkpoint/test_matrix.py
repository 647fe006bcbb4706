"""Saved under one strategy at one world size, loaded under another: the same state, the same losses.

A `<case>@<world size>` names a source or a target: `zero3@2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoint import cases
from tests.ranks import run_ranks

TOLERANCE = {"fp32": 1e-5, "bf16": 0.05}
"""bf16 losses of two strategies differ by the rounding of their sums; the state must not."""


@dataclass(frozen=True)
class Stage:
    """One pool of ranks: each case loads every source; or trains, where there is none. Then it saves, if asked to."""

    world: int
    names: tuple[str, ...]
    sources: tuple[str, ...] = ()
    saves: bool = True

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(f"{name}@{self.world}" for name in self.names)


def covering() -> list[Stage]:
    """Every strategy once or more as source and as target, from hand to hand."""
    distributed = tuple(case for case in cases.CASES if case not in ("single", "hsdp"))
    first, second = Stage(1, ("single",)), Stage(3, distributed, ("single@1",))
    third = Stage(4, ("hsdp",), second.targets)
    return [first, second, third, Stage(1, ("single",), third.targets, saves=False)]


def check(stages: Sequence[Stage], root: Path, mode: str) -> None:
    """Go through the stages, one pool of ranks for each; losses are those of the single run that was never loaded."""
    losses: list[float] = []
    for stage in stages:
        found = run_ranks(
            stage.world, "tests.checkpoint.cases:exchange", timeout=3000, names=stage.names, sources=stage.sources,
            saves=stage.saves, root=str(root), modes=(mode,),
        )  # fmt: skip
        for rank, result in enumerate(found):
            seen = {(source, f"{name}@{stage.world}") for _, source, name, _, _ in result}
            assert seen == {(source, target) for target in stage.targets for source in stage.sources or [""]}
            for _, source, name, differing, after in result:
                losses = losses or after
                pair = f"{mode} {source} → {name}@{stage.world}, rank {rank}"
                assert not differing, f"{pair}: not what was saved: {differing}"
                assert after == pytest.approx(losses, rel=0, abs=TOLERANCE[mode]), pair
    assert losses[0] - losses[-1] > 0.1, "if nothing moves, a lost optimizer state shows nowhere"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode", [pytest.param("fp32", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.release)]
)
def test_every_strategy_to_another_and_on(mode: str, tmp_path: Path) -> None:
    stages = covering()
    assert {name for stage in stages for name in stage.names} == set(cases.CASES)
    check(stages, tmp_path, mode)
