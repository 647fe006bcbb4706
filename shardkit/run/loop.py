"""The order of a training run: read data, take the step, agree, record, gather, evaluate, save, stop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.save import Checkpointer
from ..config.schema import RunConfig
from ..data.loader import StepBatch, StepLoader
from ..files import append_jsonl, write_whole
from ..hardware.cards import blas_workspace
from ..memory.probe import Phases
from ..memory.rows import gather_json
from ..parallel.optim import lr_at
from ..parallel.precision import tensors_of
from ..strategies.step import Mark
from ..tasks.base import Dataset, Task
from ..tasks.load import Prompts
from .checks import FirstUpdate, SumCheck, say_graph_breaks
from .evaluate import evaluate, write_samples
from .job import Job
from .optimizer_step import OptimizerStep
from .profiler import Profiler
from .records import LoopStep, Record, Span, StepRecords
from .requests import Requests
from .resume import Saves
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .routing import Routing


@dataclass(kw_only=True)
class Loop:
    """Takes optimizer steps until `train.max_steps`, a request to stop or an error; yields one record per step.

    On a GPU the record of a step comes after the forward of the next step, so that the host does not wait for the
    device, unless something between the two steps has to wait for it anyway.
    """

    job: Job
    config: RunConfig  # the job's, with the run's last step as `train.max_steps`.
    run_dir: Path  # where rank 0 writes `memory.jsonl`.
    task: Task
    step: int  # the step that runs, or ran last; at first the step that the run resumes from
    loss_fn: Any  # (model, batch) → summed loss
    sums: SumCheck
    loader: StepLoader
    val_parts: Mapping[str, Dataset]  # the validation data by name; empty without an evaluation
    prompts: Prompts | None  # what the model continues at an evaluation
    watchdog: Watchdog
    requests: Requests
    checkpoints: Checkpointer
    saves: Saves
    records: StepRecords
    first_update: FirstUpdate
    profiler: Profiler | None
    routing: Routing | None
    # what it wrote at the last evaluation, on rank 0, until somebody records it
    texts: list[dict[str, Any]] = field(default_factory=list)

    first_step: int = field(init=False)
    _batch: StepBatch = field(init=False)
    """The data of the next step."""
    _counts: Sequence[float] = field(init=False)
    """Targets and positions of the next step, over all ranks."""
    _reads: list[Span] = field(init=False, default_factory=list)
    """When data were read since the end of the last step."""

    def __post_init__(self) -> None:
        self.first_step = self.step + 1

    def __iter__(self) -> Iterator[Record]:
        if self._is_last(self.step):
            return
        began = self.records.start()
        self._batch = next(self.loader)
        self._reads = [(began, Mark(self.job.world.device))]
        self._set_counts(self.job.world.sum(self._count(self._batch)))
        while not self._is_last(self.step):
            step = self._begin_step()
            self._take(step)
            self.watchdog.beat(self.step, "data and reduction")
            step.reduction.finish()
            yield from self.records.postponed()
            step.refuse_bad_loss()
            self.sums.judge()
            self.job.ledger.end_step(self.step)
            self._count_rows(step)
            if self._record_may_wait():
                self.records.postpone(step)
                self._gather_memory()
                continue
            step.reads, self._reads = step.reads + self._reads, []
            record = self.records.finish(step)
            self._check_first_step(step, record)
            self._gather_memory()
            self._evaluate(record)
            self._finish_profile(record)
            yield record  # on disk before the save begins: a run resumed from that save has every step
            self._save(step, record)
            if self.requests.stop.agreed:
                return

    # data

    def _look_ahead(self, step: LoopStep, since: Mark) -> None:
        """Read the next step's data and begin the step's reduction, while the device works on the step."""
        self.watchdog.beat(self.step, "data and reduction")
        counts = [0.0, 0.0]
        if not self._is_last(self.step):
            self._batch = next(self.loader)
            self._reads.append((since, Mark(self.job.world.device)))
            counts = self._count(self._batch)
        step.reduction.add("counts", counts, self._set_counts)
        self.requests.add_to(step.reduction)
        step.begin_agreement()
        self.watchdog.beat(self.step, "backward or update")

    def _set_counts(self, sums: Sequence[float]) -> None:
        self._counts = [count / self.job.world.tp for count in sums]

    def _count(self, batch: StepBatch) -> list[float]:
        """This rank's targets, and the positions that the model computes for them (0 if the task does not say)."""
        counts = [0 if is_filler else self.task.n_targets(micro) for micro, is_filler in batch.micro_batches]
        self.sums.expect(counts)
        n_positions = getattr(self.task, "n_positions", lambda _: 0)
        return [float(sum(counts)), float(sum(n_positions(micro) for micro, _ in batch.micro_batches))]

    # step

    def _begin_step(self) -> LoopStep:
        self.step += 1
        self.first_update.look()
        lr = lr_at(self.config.optim, self.step, self.config.train.max_steps)
        for group in self.job.optimizer.param_groups:
            group["lr"] = lr
        self.job.ledger.begin_step(self.step, due=self._gather_due(self.step))
        self.watchdog.beat(self.step, "forward")
        n_targets, n_positions = self._counts
        reads, self._reads = self._reads, []
        return LoopStep(
            job=self.job, number=self.step, micro_batches=self._batch.micro_batches, n_targets=n_targets,
            loss_fn=self.loss_fn, batch=self._batch, n_positions=n_positions, lr=lr, reads=reads,
        )  # fmt: skip

    def _take(self, step: LoopStep) -> None:
        """Take the step, and begin the agreement on it where that holds up the device least."""
        watches_gathers = self._gather_due(self.step) or self._gather_due(self.step + 1)
        is_traced = self.step == self.config.memory.trace_step  # the next step's data are no part of it
        looks_ahead_early = step.host_has_time and not is_traced
        with inspected(step, self.profiler, self.run_dir) as phases:
            step.compute(phases, watches_gathers)
            if looks_ahead_early:
                self._look_ahead(step, Mark(self.job.world.device))
                step.early_read = self._reads.pop() if self._reads else None
            step.update(phases)
        if not looks_ahead_early:
            self._look_ahead(step, step.output.ended)

    # between two steps

    def _record_may_wait(self) -> bool:
        """Whether the device need not end the step yet: no save, evaluation or profile depends on its norm.

        Loss scaling (fp16) waits for the device in every step.
        """
        return (
            self.job.world.device.type == "cuda"
            and self.config.precision.mode != "fp16"
            and self.step > self.first_step
            and not self._is_last(self.step)
            and not self.save_due()
            and not self._evaluation_due()
            and not self._profile_ends()
            and self.requests.stop.agreed is None
        )

    def _check_first_step(self, step: LoopStep, record: Record) -> None:
        """Check what only the first step of this start can show; later steps get a shorter time limit."""
        if not record.get("skipped"):
            self.first_update.check(step.lr)
        if self.step == self.first_step:
            if self.config.compile.enabled:
                say_graph_breaks()
            self.watchdog.set_limit(self.config.run.step_timeout_s)

    def _gather_due(self, step: int) -> bool:
        return step == 1 or step % self.config.memory.interval == 0 or self._is_last(step)

    def _gather_memory(self) -> None:
        if not self._gather_due(self.step):
            return
        self.job.ledger.staging_bytes = self.checkpoints.staging_bytes
        rows = self.job.ledger.gather(self.step)
        if rows is not None:
            append_jsonl(self.run_dir / "memory.jsonl", gather_json(self.step, time.time(), rows))

    def _count_rows(self, step: LoopStep) -> None:
        """Sum the rows of each expert over ranks, as often as the memory's rows are gathered."""
        if self.routing is None or not self._gather_due(self.step):
            return
        step.routing, loads = self.routing.take(self.job.world)
        if self.job.world.is_main and loads:
            write_whole(self.run_dir / "experts.json", json.dumps({"step": self.step, "loads": loads}) + "\n")

    def _evaluation_due(self) -> bool:
        every = self.config.train.eval_every
        is_due = self._is_last(self.step) or (every is not None and self.step % every == 0)
        return is_due and bool(self.val_parts)

    def _evaluate(self, record: Record) -> None:
        if not self._evaluation_due():
            return
        with self.records.pause(record, "eval_s"):
            record |= evaluate(self.job, self.task, self.val_parts, self._stops_now)
            if self.prompts is not None and self.requests.stop.agreed is None:
                self.texts = write_samples(self.job, self.task, self.prompts, self.step, self._stops_now)

    def _stops_now(self) -> bool:
        """Whether some rank was asked to stop; checked before each micro-batch of an evaluation; collective."""
        self.watchdog.beat(self.step, "evaluation")
        return self.requests.stops_now()

    def _profile_ends(self) -> bool:
        return self.profiler is not None and self.profiler.ends_with(self.step)

    def _finish_profile(self, record: Record) -> None:
        if self.profiler is None or not self._profile_ends():
            return
        with self.records.pause(record, "profile_s"):
            self.profiler.finish()  # else other ranks would wait for long writes in a shorter collective
            self.checkpoints.meet(self.config.run.init_timeout_s)

    def save_due(self) -> bool:
        is_asked = self.requests.save or self.requests.stop.agreed is not None
        return self.checkpoints.due(self.step, is_last=self._is_last(self.step), requested=is_asked)

    def _save(self, step: LoopStep, record: Record) -> None:
        if not self.save_due():
            return
        is_last = self._is_last(self.step) or self.requests.stop.agreed is not None
        with self.records.pause(self.records.pauses, "save_s"):
            position, val_loss = step.batch.state_after, record.get("val_loss")
            self.saves.save(self.step, self.records.tokens_total, position, val_loss, is_last)

    def _is_last(self, step: int) -> bool:
        return step >= self.config.train.max_steps


@contextmanager
def inspected(step: OptimizerStep, profiler: Profiler | None, run_dir: Path) -> Iterator[Phases]:
    """The context in which a step is taken; yields the ledger's phases, also profiled or traced if that is due."""
    phases: Phases = step.job.ledger if profiler is None else profiler.before(step.number)
    with _traced(step, phases, run_dir) as phases:
        yield phases
    if profiler is not None:
        if profiler.ends_with(step.number) and step.reduction.has_begun:
            # torch corrupts the heap if its profiler stops while gloo runs a collective that began under it.
            step.reduction.wait()
        profiler.after(step.number)


def _traced(step: OptimizerStep, phases: Phases, run_dir: Path) -> AbstractContextManager[Phases]:
    """The context of a step, which yields its phases; traced if this is the step of `memory.trace_step`."""
    job = step.job
    if step.number != job.config.memory.trace_step:
        return nullcontext(phases)
    from ..memory.tracing.compat import TRACKER
    from ..memory.tracing.traced_step import FOLDER, traced_step

    if not TRACKER.works("memory.trace_step"):
        return nullcontext(phases)

    def save(trace: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(trace) + "\n")

    path = run_dir / FOLDER / f"rank{job.world.rank}.json"
    device, workspace = job.world.device, 0
    if device.type == "cuda":
        setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        workspace = blas_workspace(torch.cuda.get_device_capability(device), setting)
    data = tensors_of(step.micro_batches)
    return traced_step(job.strategy, job.model, phases, device, step.number, save, workspace, data)
