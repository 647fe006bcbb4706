"""Saved under one strategy at one world size, loaded under another: what came of each pair.

A `<case>@<world size>` names a source or a target: `zero3@2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.checkpoint import cases
from tests.ranks import run_ranks


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


@dataclass(frozen=True)
class Pair:
    """What one rank found after one load.

    Attributes:
        source: empty: the run that made a checkpoint itself, and went on.
        differing: names of the rank's shards that are not bit for bit what the file holds.
        losses: of the steps after the load.
    """

    mode: str
    source: str
    target: str
    rank: int
    differing: list[str]
    losses: list[float]

    def __str__(self) -> str:
        return f"{self.mode} {self.source} → {self.target}, rank {self.rank}"


@dataclass(frozen=True)
class Outcome:
    pairs: list[Pair]

    def uninterrupted(self, mode: str) -> list[float]:
        """Losses of the single run that was never loaded."""
        return next(p.losses for p in self.pairs if (p.mode, p.source, p.target) == (mode, "", "single@1"))

    def distance(self, pair: Pair) -> float:
        """The largest difference between its losses and those of the uninterrupted single run."""
        wanted = self.uninterrupted(pair.mode)
        return max(abs(loss - want) for loss, want in zip(pair.losses, wanted, strict=True))


def covering() -> list[Stage]:
    """Every strategy once or more as source and as target, from hand to hand."""
    distributed = tuple(case for case in cases.CASES if case not in cases.WORLDS)
    first, second = Stage(1, ("single",)), Stage(3, distributed, ("single@1",))
    third = Stage(4, ("hsdp",), second.targets)
    return [first, second, third, Stage(1, ("single",), third.targets, saves=False)]


def full() -> list[Stage]:
    """Everything to everything."""
    worlds = sorted({world for case in cases.CASES for world in cases.worlds(case)})
    saving = [Stage(w, tuple(case for case in cases.CASES if w in cases.worlds(case))) for w in worlds]
    everything = tuple(target for stage in saving for target in stage.targets)
    return saving + [Stage(stage.world, stage.names, everything, saves=False) for stage in saving]


def run(stages: Sequence[Stage], root: Path, modes: Sequence[str]) -> Outcome:
    """Go through the stages, one pool of ranks for each."""
    pairs = []
    for stage in stages:
        found = run_ranks(
            stage.world, "tests.checkpoint.cases:exchange", timeout=3000, names=stage.names, sources=stage.sources,
            saves=stage.saves, root=str(root), modes=tuple(modes),
        )  # fmt: skip
        pairs += [
            Pair(mode, source, f"{name}@{stage.world}", rank, differing, losses)
            for rank, result in enumerate(found)
            for mode, source, name, differing, losses in result
        ]
    return Outcome(pairs)
