"""One process that repeats a parallel run: the same weights before each step, the same rows, the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import rows
from .compare import Side
from .inject import shardkit_pieces as pieces
from .runs import PlannedStep, RecordedRun, Runner


@dataclass
class Proof:
    """Two programs and what their runs recorded."""

    command: list[str]
    process_command: list[str]
    is_replay: bool  # one process runs the same command
    runner: Runner
    parallel: RecordedRun
    feed: rows.Feed | None
    world_size: int
    taken: dict[str, RecordedRun] = field(default_factory=dict)  # step of one process → the run that took it
    newest: RecordedRun | None = None  # of one process
    process_loader: int | None = None  # the number of one process's loader that is fed
    regrouped: int | None = None  # one process's micro-batches, where the ranks' rows are dealt anew to them

    # ---- one process's runs

    def take(
        self, steps: Sequence[PlannedStep], feeds: Sequence[list[list[Any]]] | None, once: bool = False, **plan: Any
    ) -> None:
        """Let one process take steps, in as many starts as that needs, or in one. `plan`: more for the recorder."""
        remaining = list(steps)
        while remaining:
            fed = {}
            if feeds is not None:
                assert self.feed is not None and self.process_loader is not None, "nothing to feed"
                draws = [draw for feed in feeds[len(steps) - len(remaining) :] for draw in feed]
                fed = self.feed.plan(self.process_loader, draws)
            run = self.newest = self.runner.start(
                self.process_command,
                remaining,
                parallel=str(self.parallel.folder),
                replay=self.is_replay,
                **fed,
                **plan,
            )
            for name in run.steps:
                self.taken[name] = run
            if once or not run.steps:
                break
            remaining = remaining[len(run.steps) :]

    def side(self, name: str, field_: str = "raw") -> Side:
        run = self.taken[name]
        return Side(run.folder, run.record(name), field_)

    def ranks(self, step: int, field_: str = "raw") -> Side:
        return Side(self.parallel.folder, self.parallel.record(f"step{step}"), field_)

    def united(self, step: int) -> list[list[Any]]:
        assert self.feed is not None, "nothing to feed"
        return self.feed.united(step - 1, self.regrouped)

    def uses_engine(self) -> bool:
        return any(record.get("engine") for record in self.parallel.record("step1").values())

    def weights_before(self, step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The weight that both runs had before a step."""
        records = self.parallel.record("start" if step == 1 else f"step{step - 1}")
        named = pieces.by_name(records, "weights" if step == 1 else "after")
        return pieces.assemble(str(self.parallel.folder), named[name], shape)[0] if name in named else None
