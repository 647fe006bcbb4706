"""What the record of a step holds, when it is complete, and where rank 0 writes and shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data.loader import StepBatch
from ..hardware.cards import gpu_peak_flops
from ..memory.rows import RankRow
from ..strategies.step import Mark
from ..tasks.base import Task
from ..telemetry.metrics import MetricsWriter, RunProgress, targets_called
from . import directory
from .job import Job
from .optimizer_step import OptimizerStep
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..telemetry.prometheus import MetricsServer


Record = dict[str, float]
"""A line of `metrics.jsonl`."""
Span = tuple[Mark, Mark]


@dataclass(kw_only=True)
class LoopStep(OptimizerStep):
    """A step of the training loop, with the further figures of its record."""

    batch: StepBatch  # its data; `micro_batches` are those of the batch
    n_positions: float  # positions that the model computes for the targets, over all ranks; 0 if the task does not tell
    lr: float  # the learning rate
    routing: Record = field(default_factory=dict)  # how evenly experts were used until this step
    # when the host began to read data, and when it had them, between the ends of the last update and of this
    reads: list[Span] = field(default_factory=list)
    early_read: Span | None = None  # such a span that lies between the step's forward and its update


class StepRecords:
    """Makes the record of each step, once the device has finished it.

    The times of steps and pauses follow one another without gaps: their sum is the time of the run. `tokens_total`:
    target tokens of all steps so far. `n_skipped`: steps without an update in this start of the run.
    """

    def __init__(self, job: Job, watchdog: Watchdog, tokens_total: int) -> None:
        self.tokens_total, self.n_skipped = tokens_total, 0
        self.pauses: Record = {}  # seconds of pauses after the last record; they go into the next one
        self._job, self._watchdog, self._device = job, watchdog, job.world.device
        self._pause_limit_s = job.config.run.init_timeout_s
        self._waiting: LoopStep | None = None

    def start(self) -> Mark:
        """Begin the time of the first step; returns this moment."""
        self._recorded_until = Mark(self._device)
        return self._recorded_until

    def postpone(self, step: LoopStep) -> None:
        """Leave the record of this step to `postponed`; the step ends with its update."""
        self._waiting = step

    def postponed(self) -> Iterator[Record]:
        """The record that `postpone` left, if any. A loss of a later step has arrived: nothing is waited for."""
        step, self._waiting = self._waiting, None
        if step is not None:
            yield self._record(step, step.output.ended)

    def finish(self, step: LoopStep) -> Record:
        """The record of a step that ends now: waits for the device."""
        return self._record(step, Mark(self._device).wait())

    def _record(self, step: LoopStep, ended: Mark) -> Record:
        output = step.output.arrived()
        with self._watchdog.allowing(self._pause_limit_s):
            figures = step.figures()
        step_time_s = self._advance(ended)
        # On a GPU that still worked on the step before, reading data costs nothing.
        early_s = step.early_read[1] - step.early_read[0] if step.early_read else 0.0
        data_wait_s = sum((end - begin for begin, end in step.reads), early_s)
        self._job.ledger.time_step(step_time_s, data_wait_s, data_wait_s + step.busy_s())
        self.tokens_total += int(step.n_targets)
        record = {
            "step": step.number, "loss": step.loss, **figures, "lr": step.lr, "tokens": int(step.n_targets),
            "tokens_total": self.tokens_total, "step_time_s": step_time_s, "data_wait_s": data_wait_s,
            **output.times(early_s), "tokens_per_s": step.n_targets / step_time_s, **step.routing, **self.pauses,
        }  # fmt: skip
        self.pauses, self.n_skipped = {}, self.n_skipped + int(figures.get("skipped", 0))
        if step.n_positions:
            record |= {"positions": int(step.n_positions), "positions_per_s": step.n_positions / step_time_s}
        return record

    @contextmanager
    def pause(self, record: Record, name: str) -> Iterator[None]:
        """Allow work between two steps to take longer than a step; its seconds go into `record`."""
        with self._watchdog.allowing(self._pause_limit_s):
            yield
        record[name] = self._advance(Mark(self._device).wait())

    def rest_s(self) -> float:
        """Seconds after the last record and the pauses after it; waits for the device."""
        return self._advance(Mark(self._device).wait())

    def _advance(self, until: Mark) -> float:
        """Seconds since the moment up to which time is recorded, which is `until` from now on."""
        began, self._recorded_until = self._recorded_until, until
        return until - began


class Recorder:
    """`metrics.jsonl`, TensorBoard, the terminal and the Prometheus endpoint of a run; on rank 0 only.

    `n_recorded`: steps that the resumed run has already recorded. `last_step`: the run's last step.
    """

    def __init__(self, job: Job, task: Task, run_dir: Path, n_recorded: int, last_step: int) -> None:
        logging, self._world_size = job.config.logging, job.world.size
        self._seen: Sequence[RankRow] = ()
        self._server: MetricsServer | None = None
        self._address = run_dir / "logs" / "prometheus.txt"
        if logging.prometheus_port is not None:
            from ..telemetry.prometheus import MetricsServer

            self._server = MetricsServer(logging.prometheus_host, logging.prometheus_port)
            self._address.write_text(self._server.url + "\n")
        try:
            settings = job.config.model_dump(mode="json")
            self._writer = MetricsWriter(run_dir, logging.tensorboard, n_recorded, logging.wandb_project, settings)
        except BaseException:
            self._stop_serving()
            raise
        flops = getattr(task, "flops_per_token", lambda: None)()
        peak = None
        if job.world.device.type == "cuda":
            peak = gpu_peak_flops(torch.cuda.get_device_name(job.world.device), job.config.precision.mode)
        counted = targets_called(job.config.task.name, job.config.task.factory)
        self._progress = RunProgress(last_step, n_recorded, logging.every, flops, peak, counted)

    def step(self, record: Mapping[str, float], rows: Sequence[RankRow]) -> None:
        """Record a finished step; `rows` come from the last gather."""
        self._writer.write(dict(record))
        if rows is not self._seen:
            self._writer.write_memory(int(record["step"]), rows)
            self._seen = rows
        self._progress.update(record, self._world_size, rows)
        if self._server is not None:
            self._server.update(record, rows)

    def samples(self, texts: Sequence[Mapping[str, Any]]) -> None:
        """Record what the model wrote at an evaluation."""
        self._writer.write_samples(texts)

    def flush(self) -> None:
        """Write to disk what is still in memory, before a save."""
        self._writer.flush()

    def ended(self, end_save_s: float) -> None:
        """Record the seconds that the run stood still after its last step for saves."""
        self._writer.ended({"end_save_s": end_save_s})

    def close(self) -> None:
        self._stop_serving()
        self._progress.close()
        self._writer.close()

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()
            self._address.unlink(missing_ok=True)


def open_recorder(job: Job, task: Task, run_dir: Path, n_recorded: int, last_step: int) -> Recorder | None:
    """Rank 0's recorder, None elsewhere. Collective: every rank stops if rank 0 cannot record."""
    opened: list[Recorder] = []
    directory.on_main(job.world, run_dir, lambda: opened.append(Recorder(job, task, run_dir, n_recorded, last_step)))
    return opened[0] if opened else None
