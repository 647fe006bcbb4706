"""Rank 0's records of each step: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import append_jsonl, extend_last_line
from ..memory.rows import SHOWN_SINGLY, RankRow, pressure, summary

_LOG = logging.getLogger(__name__)
BOARD_S = 5.0
"""Seconds of steps that go to TensorBoard together: one by one, each would wake its writer's thread."""
_QUEUE = 10_000
"""Events that TensorBoard's writer takes at once; with its default of 10, the step would wait for its thread."""


def targets_called(task: object, factory: object) -> str:
    """The word for the targets that a task's loss averages over; more specific only for built-in tasks."""
    if factory is not None:
        return "targets"
    return "samples" if task in ("image_classification", "super_resolution") else "tokens"


class MetricsWriter:
    """Appends one JSON object per optimizer step; TensorBoard gets the same numbers and every gather's memory.

    `catalog.METRICS` lists the fields of a step's object. A number that is not finite is written as null.

    `wandb_project`: also log to this Weights & Biases project; the run keeps its id when it is resumed. `settings`: the
    run's config for Weights & Biases. `steps_before`: steps that the resumed run has already recorded; TensorBoard
    drops later ones.
    """

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool,
        steps_before: int = 0,
        wandb_project: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._wandb = None if wandb_project is None else _start_wandb(run_dir, wandb_project, settings or {})
        self._purge_step = steps_before + 1 if steps_before else None
        self._path = run_dir / "metrics.jsonl"
        self._tensorboard_dir = run_dir / "tensorboard" if tensorboard else None
        self._board: Any = None
        self._events: list[tuple[float, int, Mapping[str, float], Mapping[str, str]]] = []
        """For TensorBoard: the time in seconds since 1970, the step, its numbers and texts."""
        self._shown = 0.0

    def write(self, record: dict[str, float]) -> None:
        clean = {k: v if math.isfinite(v) else None for k, v in record.items()}
        append_jsonl(self._path, clean)
        step, figures = int(record["step"]), {f"train/{k}": v for k, v in record.items() if k != "step"}
        if self._wandb is not None:
            self._wandb.log(figures, step=step)
        if self._tensorboard_dir is not None:
            self._picture(figures, step)

    def write_samples(self, texts: Sequence[Mapping[str, Any]]) -> None:
        """Append texts of an evaluation to `samples.jsonl` ("step", "prompt", "text", "tokens"), and to TensorBoard."""
        if not texts:
            return
        append_jsonl(self._path.with_name("samples.jsonl"), *texts)
        if self._tensorboard_dir is not None:
            shown = {f"samples/{i}": f"{text['prompt']} **→** {text['text']}" for i, text in enumerate(texts)}
            self._picture({}, int(texts[0]["step"]), shown)

    def ended(self, late_fields: Mapping[str, float]) -> None:
        """Add to the last step's object what is known only at the run's end."""
        extend_last_line(self._path, late_fields)

    def flush(self) -> None:
        """Write TensorBoard's events to disk, for a save: a run that is resumed from it does not repeat their steps."""
        if self._events or self._board is not None:
            self._show(flush=True)

    def _picture(self, scalars: Mapping[str, float], step: int, texts: Mapping[str, str] | None = None) -> None:
        self._events.append((time.time(), step, scalars, texts or {}))
        is_later = self._board is not None or step > self._events[0][1]  # the first step does not wait for the import
        if is_later and time.perf_counter() - self._shown >= BOARD_S:
            self._show()

    def _show(self, flush: bool = False) -> None:
        """Hand the events to TensorBoard, which writes them within two minutes, or now."""
        events, self._events, self._shown = self._events, [], time.perf_counter()
        try:
            for event in events:
                self._add(*event)
            if flush:
                self._board.flush()
        except OSError as error:  # a full disk ends the plots, not the run
            _LOG.warning("no more TensorBoard events%s: %s", f" from step {events[0][1]} on" if events else "", error)
            self._tensorboard_dir = self._board = None

    def _add(self, moment: float, step: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
        if self._board is None:  # the import takes most of a second
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._tensorboard_dir), purge_step=self._purge_step, max_queue=_QUEUE)
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all: `add_scalar` makes one of each, which takes the step's thread and the writer's longer.
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars.items()]
        self._board.file_writer.add_summary(Summary(value=values), step, moment)
        for name, text in texts.items():
            self._board.add_text(name, text, step, moment)

    def write_memory(self, step: int, rows: Sequence[RankRow]) -> None:
        """Write each gather's spread to TensorBoard, and each rank's peak unless the world is large."""
        if self._tensorboard_dir is None or not rows:
            return
        condensed = summary(rows)
        scalars = {
            f"memory/{name}/{key}": getattr(spread, key)
            for name, spread in condensed.spreads.items()
            for key in ("max", "min", "skew")
        }
        if condensed.peak is not None and len(rows) <= SHOWN_SINGLY:
            scalars |= {f"memory_of_rank/{condensed.peak[0]}/{row.identity.rank}": pressure(row) for row in rows}
        self._picture(scalars, step)

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()
        if self._events:
            self._show()
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                _LOG.warning("the last TensorBoard events are lost: %s", error)


def _start_wandb(run_dir: Path, project: str, settings: dict[str, Any]) -> Any:
    """A Weights & Biases run whose id is kept in the run directory."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"logging.wandb_project={project} needs wandb, which does not import: {error}",
            "pip install 'shardkit[wandb]', or remove logging.wandb_project",
        ) from error
    id_file = run_dir / "wandb" / "run_id"
    run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(4)
    try:
        run = wandb.init(
            project=project, dir=str(run_dir), id=run_id, resume="allow", config=settings, name=run_dir.name
        )
    except (wandb.errors.Error, OSError) as error:
        raise ConfigError(
            f"logging.wandb_project={project}: {error}",
            "log in with `wandb login`, set WANDB_MODE=offline, or remove logging.wandb_project",
        ) from error
    id_file.parent.mkdir(exist_ok=True)
    id_file.write_text(run_id + "\n")
    return run
