"""When the run saves, how long a save may take, and what a checkpoint holds beside the tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.native.manifest import RunState
from ..checkpoint.save import Checkpointer, SaveReport
from ..config.schema import RunConfig
from ..data.order import State
from ..files import TAIL, append_jsonl, read_objects
from ..memory.phases import doing
from .watchdog import Part, Watchdog


def save_log(run_dir: Path) -> Path:
    """The file with one line for each save."""
    return run_dir / "logs" / "checkpoints.jsonl"


def note_save(run_dir: Path, report: SaveReport) -> None:
    """Record a finished save, on rank 0."""
    append_jsonl(save_log(run_dir), {**asdict(report), "path": str(report.path)})


class Saves:
    """The saves of a run.

    Args:
        about: what a resume compares: see `RunState.extra`.
        n_samples: of the training split.
    """

    def __init__(
        self,
        config: RunConfig,
        checkpoints: Checkpointer,
        watchdog: Watchdog,
        run_dir: Path,
        n_samples: int,
        about: dict[str, Any],
    ) -> None:
        self._config, self._checkpoints, self._watchdog, self._run_dir = config, checkpoints, watchdog, run_dir
        self._n_samples, self._about = n_samples, about

    def describe_limits(self) -> list[str]:
        """Lines about the time between saves, and how long one may stand still, by the run's earlier saves."""
        checkpoints = self._checkpoints
        if self._config.run.resume is not False:
            lines = read_objects(save_log(self._run_dir), TAIL)
            checkpoints.remember([float(s["total_s"]) for s in lines if "total_s" in s and not s.get("error")])
        interval, limit_s = checkpoints.describe_default(), checkpoints.standstill_s()
        limit = f"if a save makes no progress for {limit_s:.0f} s, the job ends (checkpoint.timeout_s)"
        return [interval, limit] if interval else [limit]

    def unhurried(self, step: int) -> AbstractContextManager[None]:
        """Let a save take as long as its files grow on some rank."""
        self._watchdog.beat(step, "save")
        saves = self._checkpoints
        return self._watchdog.within(
            Part(saves.standstill_s(), "checkpoint.timeout_s", saves.written_bytes, saves.phase)
        )

    def save(self, step: int, tokens_total: int, position: State, val_loss: float | None, is_last: bool) -> None:
        """Save the state after a step, whose data end at `position`."""
        seed = self._config.train.seed
        run = RunState(
            step, tokens_total, seed, position.epoch, position.next_sample, self._n_samples, val_loss, self._about
        )
        with self.unhurried(step), doing("save"):
            self._checkpoints.save(run, is_last)
