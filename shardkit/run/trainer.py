"""A training run of the config's task: its construction, its recorder, and the words at its end."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ..checkpoint.save import Checkpointer
from ..config.schema import RunConfig
from ..data.loader import BatchSchedule, State
from ..data.text_data import Mixed
from ..data.windows import PackedDocuments
from ..errors import DataError
from ..launch.failures import failure
from ..launch.local import restart
from ..parallel.blocks import describe_blocks
from ..parallel.compat import progress_of_groups
from ..parallel.world import World
from ..strategies.build import slower_than_single
from ..tasks.base import Dataset, Task
from ..tasks.load import Prompts, build_model, load_task, read_prompts
from ..telemetry.metrics import draws_bars
from . import checks, directory
from .checks import FirstUpdate, SumCheck, check_same_data, make_loader, make_schedule, val_parts
from .evaluate import report
from .job import Job
from .loop import Loop
from .owner import Owner
from .profiler import Profiler
from .records import Record, StepRecords, open_recorder
from .requests import Requests, StopRequest
from .resume import Saves, StartingPoint, note_save
from .watchdog import WATCHED_S, Watchdog

if TYPE_CHECKING:
    from .routing import Routing


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    steps: int  # optimizer steps done
    loss: float  # mean loss of the last step
    val_loss: float | None  # mean validation loss at the end; `None` without validation data
    stopped_by: str | None = None  # the signal that ended the run before `train.max_steps`; `None` if none did.


class Trainer:
    """Trains `task` of the config under the job's strategy and writes the run directory."""

    job: Job
    config: RunConfig  # the job's; `train.max_steps` is the run's last step, which `train.epochs` may set.
    world: World

    task: Task
    data: Dataset  # the training split
    val_data: dict[str, Dataset]  # the validation split by the names of its parts
    prompts: Prompts | None
    schedule: BatchSchedule
    routing: Routing | None = None  # None = the model has no experts, or is compiled

    run_dir: Path
    owner: Owner | None  # of the run directory, on rank 0
    start: StartingPoint

    stop: StopRequest
    watchdog: Watchdog
    checkpoints: Checkpointer
    saves: Saves
    loop: Loop

    def __init__(self, job: Job) -> None:
        self.job, self.config, self.world = job, job.config, job.world
        directory.check(job.loaded, job.world)
        self._read_data()
        self._enter_directory()
        self._build_model()
        self._begin()

    def _read_data(self) -> None:
        """Load the task and its data, which must be the same on every rank."""
        self._say("reading the data")
        with self.job.ledger.phase("init"):
            self.task = load_task(checks.without_validation(self.config))
            data = self.task.dataset("train")
            self.val_data = val_parts(self.task) if self.config.train.eval_samples else {}
            check_same_data(self.world, data, self.val_data, self._digests())
            self.prompts = read_prompts(self.config, self.task)
            if data is None or len(data) == 0:
                raise DataError("the task's training split is empty", "check data.path or the task's dataset('train')")
            self.data, self.schedule = data, make_schedule(self.config, self.world, data)

    def _enter_directory(self) -> None:
        """Claim the run directory, and say which data the run has."""
        self.run_dir, owner = directory.prepare(self.job.loaded, self.world)
        self.owner = None if owner is None else self.job.at_end.enter_context(owner)
        self._say(checks.describe_split(self.config, self.data, self.val_data))
        n_ranks = "1 rank" if self.world.size == 1 else f"{self.world.size} ranks"
        if isinstance(self.data, PackedDocuments | Mixed) and (packed := self.data.describe()):
            self._say(packed)
        self._say(f"{len(self.data):,} samples; building the model for {self.config.parallel.strategy} on {n_ranks}")
        if hint := slower_than_single(self.config, self.world.size):
            self._say(hint)

    def _build_model(self) -> None:
        """Build and wrap the model; its weights may still have to be loaded."""
        job, task = self.job, self.task
        self.start = StartingPoint(job, task, self.run_dir, self.schedule.n_samples, self._digests())
        job.wrap(
            self._build_counted,
            block_classes=getattr(task, "block_classes", ()),
            attention_classes=getattr(task, "attention_classes", ()),
            init_parameter=getattr(task, "init_parameter", None),
            drawn=not self.start.loads_weights,
        )
        hosts = [str(host) for host in job.world.gather(os.environ.get("SLURMD_NODENAME") or os.uname().nodename)]
        self.watchdog = Watchdog(
            self.run_dir / "logs" / "hang", job.world.rank, job.world.size, self.config.run.init_timeout_s,
            block=lambda: job.calls.last_called, hosts=hosts, key="run.init_timeout_s",
            pulse=self._say_pulse if job.world.is_main else None,
        )  # fmt: skip
        self._say(f"blocks: {describe_blocks(job.model, [*job.blocks.values()])}")
        self.start.freeze_base(self._say)

    def _build_counted(self) -> nn.Module:
        """Build the model, whose routers are counted if it has experts; compiled blocks would be cut by the hooks."""
        model = build_model(self.config, self.task)
        has_experts = any(isinstance(getattr(module, "num_experts", None), int) for module in model.modules())
        if has_experts and not self.config.compile.enabled:
            from .routing import Routing  # DTensor's class takes 0.4 s to import

            self.routing = Routing(model)
        return model

    def _begin(self) -> None:
        """Load weights and checkpoint, and make the loop that goes on from there."""
        job, config, world, owner = self.job, self.config, self.world, self.owner
        self.checkpoints = Checkpointer(
            job.strategy, world, config.checkpoint, self.run_dir / "checkpoints",
            timeout_s=config.run.init_timeout_s,
            on_done=partial(note_save, self.run_dir) if world.is_main else lambda report: None,
            fence=None if owner is None else owner.fence,
            left_out=self.start.base.names if self.start.base else (),
        )  # fmt: skip
        resumed = self.start.resume(self.checkpoints)
        position = State(resumed.epoch, resumed.next_sample)
        last_step = checks.last_step(config.train, self.schedule, resumed.step, position)
        if config.train.epochs is not None:  # the run ends with its last pass over the data
            directory.note_last_step(world, self.run_dir, last_step)
        self.config = config = config.model_copy(
            update={"train": config.train.model_copy(update={"max_steps": last_step})}
        )
        n_steps = max(0, config.train.max_steps - resumed.step)
        loader = make_loader(config, world, self.task, self.data, self.schedule, position, n_steps)
        self._say(checks.describe_passes(self.data, self.schedule, config.train.max_steps))
        if world.is_main and (warning := checks.doubt(config.train, self.schedule)) is not None:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        n_samples = self.schedule.n_samples
        self.saves = Saves(config, self.checkpoints, self.watchdog, self.run_dir, n_samples, self.start.about())
        for line in self.saves.describe_limits():
            self._say(line)
        compiling = ", which compiles the model" if config.compile.enabled else ""
        self._say(f"writing to {self.run_dir}; the first step takes the longest{compiling}")
        self.stop = StopRequest()
        sums = SumCheck("task.loss", "return the sum over the batch's targets (docs/tasks.md)")
        self.loop = Loop(
            job=job, config=config, run_dir=self.run_dir, task=self.task, step=resumed.step,
            loss_fn=self.watchdog.around(job.calls.around(sums.around(self.task.loss))), sums=sums, loader=loader,
            val_parts=self.val_data, prompts=self.prompts, watchdog=self.watchdog,
            requests=Requests(world, self.stop, owner, self.checkpoints.time_is_up),
            checkpoints=self.checkpoints, saves=self.saves,
            records=StepRecords(job, self.watchdog, resumed.tokens_total),
            first_update=FirstUpdate(world, job.strategy), routing=self.routing,
            profiler=None if config.profile.start is None
            else Profiler(config, world, job.ledger, self.run_dir),
        )  # fmt: skip

    def _digests(self) -> dict[str, str]:
        digests: dict[str, str] = getattr(self.task, "digests", dict)()
        return digests

    def _say(self, line: str) -> None:
        if self.world.is_main:
            print(line, flush=True)

    def _say_pulse(self, step: int, doing: str, seconds: float) -> None:
        """Say that a long step goes on; bars on a terminal show it themselves."""
        if not draws_bars():
            print(f"step {step}/{self.config.train.max_steps}: {doing}, {seconds:.0f} s so far", flush=True)

    def fit(self) -> Outcome:
        """Train to `train.max_steps`."""
        loop = self.loop
        outcome = Outcome(loop.step, math.nan, None)
        record: Record = {}
        for record in self.recorded_steps():
            outcome = Outcome(int(record["step"]), record["loss"], record.get("val_loss"), self.stop.agreed)
        if loop.step < loop.first_step:
            self._say(f"nothing to do: the run is at step {loop.step} of train.max_steps={self.config.train.max_steps}")
        elif self.world.is_main:
            if skipped := loop.records.n_skipped:
                print(f"{skipped} of {loop.step - loop.first_step + 1} steps were skipped")
            report(self.job, self.task, self.run_dir, {k: v for k, v in record.items() if k.startswith("val_")})
            self._say_stop(outcome)
        return outcome

    def _say_stop(self, outcome: Outcome) -> None:
        """Say why the run stopped before its last step, which checkpoint it saved, and how it goes on."""
        saved = self.checkpoints.last_report
        if outcome.stopped_by is None or saved is None or outcome.steps == self.config.train.max_steps:
            return
        at = f"after step {outcome.steps} of {self.config.train.max_steps}"
        print(f"stopped by {outcome.stopped_by} {at}: saved {saved.path}", flush=True)
        if "SHARDKIT_KEEP" not in os.environ:  # else the launcher, which knows its own command, says it
            print(restart.how_to_continue(sys.argv, self.config.run.overwrite), flush=True)

    def steps(self) -> Iterator[Record]:
        """Take one optimizer step per iteration; yields its record for `metrics.jsonl`."""
        return iter(self.loop)

    def recorded_steps(self) -> Iterator[Record]:
        """`steps`, while rank 0 writes `metrics.jsonl` and shows progress; closes everything at the end."""
        loop, records = self.loop, self.loop.records
        recorder = open_recorder(self.job, self.task, self.run_dir, loop.step, self.config.train.max_steps)
        failed = True
        self.stop.listen()
        self.watchdog.start()
        self.world.set_timeout(WATCHED_S)
        try:
            for record in self.job.explained(self.steps()):  # explained before closing frees memory
                if recorder is not None and loop.requests.lost() is None:
                    recorder.step(record, self.job.ledger.last_rows)
                    recorder.samples(loop.texts)
                    loop.texts = []
                    if loop.save_due():
                        recorder.flush()
                yield record
            has_saved = bool(records.pauses) or self.checkpoints.saves_now
            with self.saves.unhurried(loop.step):
                self.checkpoints.check_last()
            if recorder is not None and has_saved and loop.requests.lost() is None:
                recorder.ended(records.pauses.get("save_s", 0.0) + records.rest_s())
            failed = False
        except Exception as error:
            # Before closing, which waits for a background save, perhaps longer than the launcher does.
            failure.record(error, groups=progress_of_groups())
            raise
        finally:
            if failed:
                self.watchdog.stop()
            loop.loader.close()
            if recorder is not None:
                recorder.close()
            try:
                with self.saves.unhurried(loop.step):
                    self.checkpoints.close(failed)
            finally:
                self.watchdog.stop()
                self.stop.close()
                if loop.profiler is not None:
                    loop.profiler.close(failed)
