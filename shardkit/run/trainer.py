"""The loop: batch → forward → backward → clip → step → account; rank 0 writes and shows."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from ..checkpoint.base import FrozenBase, check_adapter
from ..checkpoint.native.manifest import RunState
from ..checkpoint.resume import candidates
from ..checkpoint.save import Checkpointer, SaveReport
from ..config.load import resolve_batch
from ..data.datasets.text_data import Mixed
from ..data.loader import StepBatch, StepLoader
from ..data.order import BatchSchedule, Order, State
from ..data.pack import PackedDocuments
from ..errors import CheckpointError, ConfigError, DataError, TrainingError, gib
from ..files import TAIL, append_jsonl, read_objects, write_whole
from ..hardware.cards import blas_workspace
from ..launch.failures import failure
from ..launch.local import restart
from ..memory.phases import Phases, doing
from ..memory.rows import gather_json
from ..parallel.blocks import describe_blocks
from ..parallel.optim import lr_at
from ..strategies import slower_than_single
from ..strategies.clocks import HostValue, Mark, Stopwatch
from ..strategies.step import Meanwhile, StepOutput, train_step
from ..tasks.base import Dataset
from ..tasks.load import build_model, load_task, read_prompts
from ..telemetry.progress import draws_bars
from . import amounts, checks, directory
from .checks import SumCheck, not_finite_gradient
from .evaluate import evaluate, report, val_parts
from .job import Job, not_finite
from .owner import superseded
from .preemption import StopRequest
from .profiler import Profiler
from .recorder import open_recorder
from .samples import write_samples
from .watchdog import WATCHED_S, Part, Watchdog


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: optimizer steps done.
        loss: mean loss of the last step.
        val_loss: mean validation loss at the end; `None` without validation data.
        stopped_by: the signal that ended the run before `train.max_steps`; `None` if none did.
    """

    steps: int
    loss: float
    val_loss: float | None
    stopped_by: str | None = None


@dataclass
class _Taken:
    """A step that the device may still work on, with the data for its record and for tracing a bad norm.

    `waits`: when the host began to read data, and when it had them; both lie between the ends of two updates.
    `gathers`: forward's waits for other ranks.
    `inside`: the same as one of `waits`, within this step's backward.
    """

    step: int
    out: StepOutput
    batch: StepBatch
    targets: float
    positions: float
    lr: float
    waits: list[tuple[Mark, Mark]]
    pauses: dict[str, float]
    gathers: Stopwatch | None
    inside: tuple[Mark, Mark] | None
    loss: float = math.nan


@dataclass
class _Ahead:
    """What the host has prepared while the device works on a step.

    Attributes:
        batch: the next step's.
        wait: when the host began to read it, and when it had it; `None` after the last step.
        sums: the ranks' agreement on this step, begun.
    """

    batch: StepBatch
    wait: tuple[Mark, Mark] | None
    sums: Callable[[], list[float]]


class Trainer:
    """Trains `task` of the config under the job's strategy and writes the run directory."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = job.config
        self.world = job.world
        self.accum = resolve_batch(self.config, job.world.size)
        self.step = self.skipped_steps = 0
        self._moved = False
        self.tokens_total = 0
        self.samples: list[dict[str, Any]] = []
        """Texts of the last evaluation that are not recorded yet; on rank 0."""
        self._pauses: dict[str, float] = {}
        directory.check(job.loaded, job.world)
        self._say("reading the data")
        with job.ledger.phase("init"):
            self.task = load_task(amounts.without_validation(self.config))
            data = self.task.dataset("train")
            self.val_parts = val_parts(self.task) if self.config.train.eval_samples else {}
            checks.check_same_data(job.world, data, self.val_parts)
            self.prompts = read_prompts(self.config, self.task)
            if data is None or len(data) == 0:
                raise DataError("the task's training split is empty", "check data.path or the task's dataset('train')")
            checks.check_same_digests(job.world, self._digests())
            self.schedule = self._make_schedule(data)
        self.run_dir, owner = directory.prepare(job.loaded, job.world)
        self.owner = None if owner is None else job.at_end.enter_context(owner)
        self._say(amounts.describe_split(self.config, data, self.val_parts))
        n_ranks = "1 rank" if job.world.size == 1 else f"{job.world.size} ranks"
        if isinstance(data, PackedDocuments | Mixed) and (packed := data.describe()):
            self._say(packed)
        self._say(f"{len(data):,} samples; building the model for {self.config.parallel.strategy} on {n_ranks}")
        if hint := slower_than_single(self.config, job.world.size):
            self._say(hint)
        job.wrap(
            partial(build_model, self.config, self.task),
            block_classes=getattr(self.task, "block_classes", ()),
            attention_classes=getattr(self.task, "attention_classes", ()),
            init_parameter=getattr(self.task, "init_parameter", None),
            drawn=not (loads := self._will_load()),
        )
        self.stop = StopRequest()
        hang, limit = self.run_dir / "logs" / "hang", self.config.run.init_timeout_s
        hosts = [str(host) for host in job.world.gather(os.environ.get("SLURMD_NODENAME") or os.uname().nodename)]
        self.watchdog = Watchdog(
            hang, job.world.rank, job.world.size, limit, block=lambda: job.calls.last, hosts=hosts,
            key="run.init_timeout_s", pulse=self._say_pulse if job.world.is_main else None,
        )  # fmt: skip
        self._sums = SumCheck()
        self.loss = self.watchdog.around(job.calls.around(self._sums.around(self.task.loss)))
        if job.world.is_main:
            print(f"blocks: {describe_blocks(job.model, job.calls.blocks)}", flush=True)
        self.base = self._frozen_base()
        self.checkpoints = Checkpointer(
            job.strategy, job.world, self.config.checkpoint, self.run_dir / "checkpoints",
            timeout_s=self.config.run.init_timeout_s, on_done=self._note_save,
            fence=None if owner is None else owner.fence, left_out=self.base.names if self.base else (),
        )  # fmt: skip
        position = self._resume(loads)
        self._end_with_epochs(position)
        self.loader = self._make_loader(data, position)
        self._say_passes(data)
        self._limit_saves()
        self.first_step = self.step + 1
        compiling = ", which compiles the model" if self.config.compile.enabled else ""
        self._say(f"writing to {self.run_dir}; the first step takes the longest{compiling}")
        profiled = self.config.profile.start is not None
        self.profiler = Profiler(self.config, job.world, job.strategy, job.ledger, self.run_dir) if profiled else None

    def _say(self, doing_now: str) -> None:
        if self.world.is_main:
            print(doing_now, flush=True)

    def _say_pulse(self, step: int, doing: str, seconds: float) -> None:
        """Say that a long step goes on; bars on a terminal show it themselves."""
        if not draws_bars():
            print(f"step {step}/{self.config.train.max_steps}: {doing}, {seconds:.0f} s so far", flush=True)

    def _adapter(self) -> Any:
        return getattr(self.task, "adapter", None)

    def _frozen_base(self) -> FrozenBase | None:
        """The model under the task's adapter; `None` if the whole model is trained."""
        adapter = self._adapter()
        if adapter is None:
            return None
        base = FrozenBase(self.job.model, adapter.settings, adapter.base_name, self.config.model.init_from)
        self._say(f"adapter: {self.config.adapter.type} on {len(adapter.targets)} layers, {base.line}")
        return base

    def _will_load(self) -> bool:
        """Whether every weight comes from a checkpoint or from `model.init_from`; collective."""
        run = self.config.run
        if self._adapter() is not None:  # files hold either the adapter or the model under it
            return False
        if self.config.model.init_from is not None or run.source is not None:
            return True
        found = False
        with suppress(OSError):  # `resume` raises it on every rank
            found = run.continues and self.world.is_main and bool(candidates(self.run_dir))
        return self.world.sum([float(found)])[0] > 0

    def _resume(self, loads: bool) -> State:
        """Resume from the checkpoint that `run.resume` asks for; returns the position in the data.

        Args:
            loads: the initial weights were left out, as there was something to load.
        """
        asked = self.config.run
        if asked.resume is False or self.base is not None:
            self._take_weights()
        if self.base is not None:
            self.base.identify(self.job.strategy, self.checkpoints.group)
        if asked.resume is False:
            return State()
        found = self.checkpoints.resume(asked.source or self.run_dir, self._accept)
        if found is None and asked.source is not None:
            raise CheckpointError(
                f"run.resume={asked.source}: there is no checkpoint", "name a checkpoint, or a run with one"
            )
        if found is None and loads and self.config.model.init_from is None:
            raise CheckpointError(f"the checkpoints in {self.run_dir} vanished while the run started", "start it again")
        if found is None and self.base is None:
            self._take_weights()
        run = found[1] if found else RunState(step=0)
        directory.go_on(self.job.loaded, self.world, self.run_dir, run.step)
        if self.world.is_main:
            where = f"from {found[0]}, step {run.step}" if found else "from the start: there is no checkpoint yet"
            print(f"resuming {where}", flush=True)
        self.step, self.tokens_total = run.step, run.tokens_total
        return State(run.epoch, run.next_sample)

    def _end_with_epochs(self, position: State) -> None:
        """Let the run end with its last pass: from here on `self.config.train.max_steps` is its last step."""
        train = self.config.train
        last = amounts.last_step(train, self.schedule, self.step, position)
        if train.epochs is not None:
            directory.note_last_step(self.world, self.run_dir, last)
        self.config = self.config.model_copy(update={"train": train.model_copy(update={"max_steps": last})})

    def _say_passes(self, data: Dataset) -> None:
        self._say(amounts.describe_passes(data, self.schedule, self.config.train.max_steps))
        if self.world.is_main and (warning := amounts.doubt(self.config.train, self.schedule)) is not None:
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    def _take_weights(self) -> None:
        """Start with the weights that `model.init_from` names."""
        if self.config.model.init_from is None:
            return
        from ..checkpoint.formats.start import load_weights

        adapter, source = self._adapter(), self.config.model.init_from
        name_there = adapter.base_name if adapter else str
        resized = getattr(self.task, "resized", ())
        loaded = load_weights(self.job.strategy, self.world, self.checkpoints.group, source, name_there, resized)
        if self.world.is_main:
            read = f" ({gib(loaded.bytes_read)} read)" if loaded.bytes_read else ""
            print(f"starting with the weights of {loaded.path}{read}", flush=True)
            for name, (old, new) in loaded.resized.items():
                print(f"{name}: {old} rows, and {new - old} new ones with their mean", flush=True)

    def _accept(self, run: RunState) -> None:
        """Refuse a checkpoint whose data position does not apply to this run."""
        seed, n_samples = self.config.train.seed, self.schedule.n_samples
        if run.seed != seed and "imported" not in run.extra:  # another tool's data order does not apply here
            raise ConfigError(f"train.seed={seed}, but the checkpoint's is {run.seed}", f"set train.seed={run.seed}")
        packing = run.extra.get("packing")
        if packing not in (None, self.config.data.packing):
            raise ConfigError("data.packing differs from the checkpoint's", f"set data.packing={packing}")
        for name, digest in (run.extra.get("digests") or {}).items():
            now = self._digests().get(name)
            if now != digest:
                raise DataError(
                    f"the {name} is not the one that the checkpoint was trained with: digest {now or 'none'}, then "
                    f"{digest}",
                    f"resume with the same {name}, and with train.eval_samples=0 only if it was 0 then; to go on with "
                    "another, start from the weights: model.init_from=RUN",
                )
        if run.n_samples not in (None, n_samples):
            raise DataError(
                f"the training split has {n_samples} samples, it had {run.n_samples} when the checkpoint was made",
                "resume with the same data, train.seq_len, data.val_fraction and train.eval_samples (0 trains on all)",
            )
        check_adapter(self.base, run.extra.get("adapter"))
        shuffle = run.extra.get("shuffle")
        if shuffle not in (None, self.config.data.shuffle):
            raise ConfigError("data.shuffle differs from the checkpoint's", f"set data.shuffle={shuffle}")

    def _digests(self) -> dict[str, str]:
        """Digests of the data that the task names."""
        found: dict[str, str] = getattr(self.task, "digests", dict)()
        return found

    def _make_schedule(self, samples: Dataset) -> BatchSchedule:
        train, data = self.config.train, self.config.data
        if train.micro_batch_size > len(samples):
            raise DataError(
                f"train.micro_batch_size={train.micro_batch_size} is more than the {len(samples)} samples of the "
                "training split",
                f"set it to {max(1, len(samples) // (self.accum * self.world.size))} or less, or use more data",
            )
        own = getattr(samples, "order", None)
        order: Order | None = own(train.seed, data.shuffle) if callable(own) else None
        try:
            return BatchSchedule(
                n_samples=len(samples) if order is None else order.n,
                global_batch=train.micro_batch_size * self.accum * self.world.size,
                micro_batch=train.micro_batch_size,
                accum=self.accum,
                rank=self.world.rank,
                world=self.world.size,
                seed=train.seed,
                shuffle=data.shuffle,
                drop_last=data.drop_last,
                order=order,
            )
        except ValueError as error:
            raise DataError(
                f"the training split cannot fill a step: {error}", "use more data, or smaller batches"
            ) from error

    def _make_loader(self, samples: Dataset, state: State) -> StepLoader:
        data = self.config.data
        return StepLoader(
            samples,
            self.schedule,
            getattr(self.task, "collate", None),
            state=state,
            n_steps=max(0, self.config.train.max_steps - self.step),
            workers=data.workers,
            prefetch=data.prefetch,
            pin_memory=self.world.device.type == "cuda",
        )

    def fit(self) -> Outcome:
        """Train to `train.max_steps`.

        Raises:
            TrainingError: a loss or gradient is not finite (names step and rank), or no parameter changes in the first
                step.
        """
        outcome = Outcome(self.step, math.nan, None)
        record: dict[str, float] = {}
        for record in self.recorded_steps():
            outcome = Outcome(int(record["step"]), record["loss"], record.get("val_loss"), self.stop.agreed)
        if self.step < self.first_step:
            if self.world.is_main:
                print(f"nothing to do: the run is at step {self.step} of train.max_steps={self.config.train.max_steps}")
        elif self.world.is_main:
            if self.skipped_steps:
                print(f"loss scaling skipped {self.skipped_steps} of {self.step - self.first_step + 1} steps")
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

    def recorded_steps(self) -> Iterator[dict[str, float]]:
        """`steps`, while rank 0 writes `metrics.jsonl` and shows progress; closes everything at the end."""
        recorder = open_recorder(self.job, self.task, self.run_dir, self.step, self.config.train.max_steps)
        failed = True
        self.stop.listen()
        self.watchdog.start()
        self.world.set_timeout(WATCHED_S)
        try:
            for record in self.job.explained(self.steps()):  # explained before closing frees memory
                if recorder is not None and self._lost() is None:
                    recorder.step(record, self.job.ledger.last_rows)
                    recorder.samples(self.samples)
                    self.samples = []
                yield record
            saved = bool(self._pauses) or self.checkpoints.saves_now
            with self._unhurried():
                self.checkpoints.check_last()
            if recorder is not None and saved and self._lost() is None:
                waited = Mark(self.world.device).wait() - self._lap
                recorder.ended(self._pauses.get("save_s", 0.0) + waited)
            failed = False
        except Exception as error:
            failure.record(error)  # closing waits for a background save, perhaps longer than the launcher does
            raise
        finally:
            if failed:
                self.watchdog.stop()
            self.loader.close()
            if recorder is not None:
                recorder.close()
            try:
                with self._unhurried():
                    self.checkpoints.close(failed)
            finally:
                self.watchdog.stop()
                self.stop.close()
                if self.profiler is not None:
                    self.profiler.close(failed)

    def steps(self) -> Iterator[dict[str, float]]:
        """Take one optimizer step per iteration; yields its record for `metrics.jsonl`.

        On a GPU a step's record comes after the next step's forward, unless something must wait for the step anyway.
        """
        if self.step >= self.config.train.max_steps:
            return
        self._lap = Mark(self.world.device)
        batch = next(self.loader)
        waits = [(self._lap, Mark(self.world.device))]
        targets, positions = self.world.sum(self._count(batch))
        late: _Taken | None = None
        while self.step < self.config.train.max_steps:
            self.step += 1
            unmoved = None if self._moved else self._fingerprint()
            lr = self._set_lr()
            self.job.ledger.begin_step(self.step, due=self._gather_due(self.step))
            self.watchdog.beat(self.step, "forward")
            with self.job.calls.waits.watching(
                self._gather_due(self.step) or self._gather_due(self.step + 1)
            ) as gathers:
                meanwhile = Meanwhile(partial(self._look_ahead, batch))
                out = self._train_step(batch, targets, meanwhile)
            early, ahead = meanwhile.done, meanwhile(out.loss_sum, out.ended)
            self.watchdog.beat(self.step, "data and reduction")
            inside = ahead.wait if early else None
            taken = _Taken(self.step, out, batch, targets, positions, lr, waits, self._pauses, gathers, inside)
            batch, waits = ahead.batch, [ahead.wait] if ahead.wait and not early else []
            loss, next_counts, stays_finite = self._agree(ahead.sums(), targets)
            if late is not None:  # its update ended before this loss
                yield self._finished(late, late.out.ended)
            if not stays_finite:
                raise not_finite(self.world, self.step, out.loss_sum.item())
            self._sums.judge("task.loss", "return the sum over the batch's targets (docs/tasks.md)")
            self.job.ledger.end_step(self.step)
            taken.loss, (targets, positions), self._pauses = loss, next_counts, {}
            if self._may_be_late():  # it ends with its update, before the data came
                late = taken
                if self._gather_due(self.step):
                    self._gather_memory()
                continue
            taken.waits += waits
            late, waits, record = None, [], self._finished(taken, Mark(self.world.device).wait())
            if unmoved is not None and not record.get("skipped"):
                self._check_moved(unmoved, lr)
            if self.step == self.first_step:
                checks.audit(self.job.strategy, self.world, self.run_dir)
                if self.config.compile.enabled:
                    checks.say_graph_breaks()
                self.watchdog.set_limit(self.config.run.step_timeout_s)
            if self._gather_due(self.step):
                self._gather_memory()
            if self.val_parts and self._eval_due():
                with self._pause(record, "eval_s"):
                    record |= evaluate(self.job, self.task, self.val_parts, self._stop_asked)
                    if self.prompts is not None and self.stop.agreed is None:
                        self.samples = write_samples(self.job, self.task, self.prompts, self.step, self._stop_asked)
            if self.profiler is not None and self.profiler.ends_with(self.step):
                with self._pause(record, "profile_s"):
                    self.profiler.finish()  # else other ranks would wait for long writes in a shorter collective
                    self.checkpoints.meet(self.config.run.init_timeout_s)
            yield record  # on disk before the save begins: a run resumed from that save has every step
            if self._save_due():
                with self._pause(self._pauses, "save_s"), self._unhurried():
                    self._save(taken.batch.state_after, record.get("val_loss"))
            if self.stop.agreed:
                return

    def _may_be_late(self) -> bool:
        """Whether the step's norm can wait: no save, evaluation or profile depends on it.

        fp16's loss scaling waits for the device in every step.
        """
        return (
            self.world.device.type == "cuda"
            and self.config.precision.mode != "fp16"
            and self.first_step < self.step < self.config.train.max_steps
            and not self._save_due()
            and not (self.val_parts and self._eval_due())
            and not (self.profiler is not None and self.profiler.ends_with(self.step))
            and self.stop.agreed is None
        )

    def _finished(self, taken: _Taken, ended: Mark) -> dict[str, float]:
        """The record of a step whose end has come.

        Raises:
            TrainingError: the step's gradient is not finite.
        """
        taken.out.ended.past()
        norm, config = taken.out.grad_norm.item(), self.config
        if not math.isfinite(norm) and config.precision.mode != "fp16":
            with self.watchdog.allowing(config.run.init_timeout_s):
                raise not_finite_gradient(
                    self.job.strategy, self.job.ledger, self.world, taken.step,
                    taken.batch.micro_batches, self.loss, taken.targets,
                )  # fmt: skip
        step_time, self._lap = ended - self._lap, ended
        # On a GPU that still worked on the step before, reading data costs nothing.
        within = taken.inside[1] - taken.inside[0] if taken.inside else 0.0
        wait = sum((had - began for began, had in taken.waits), within)
        self.job.ledger.time_step(step_time, wait, wait + taken.out.busy_s(taken.gathers))
        self.tokens_total += int(taken.targets)
        record = {
            "step": taken.step, "loss": taken.loss, "grad_norm": norm, "lr": taken.lr, "tokens": int(taken.targets),
            "tokens_total": self.tokens_total, "step_time_s": step_time, "data_wait_s": wait, **taken.out.times(within),
            "tokens_per_s": taken.targets / step_time, **taken.pauses,
        }  # fmt: skip
        if taken.positions:
            record |= {"positions": int(taken.positions), "positions_per_s": taken.positions / step_time}
        self._note_scaling(record)
        return record

    @contextmanager
    def _pause(self, record: dict[str, float], name: str) -> Iterator[None]:
        """Allow work between two steps to take longer than a step; its seconds go into `record`."""
        with self.watchdog.allowing(self.config.run.init_timeout_s):
            yield
        ended = Mark(self.world.device).wait()
        record[name], self._lap = ended - self._lap, ended

    def _train_step(self, batch: StepBatch, targets: float, meanwhile: Meanwhile[_Ahead]) -> StepOutput:
        phases = self.job.ledger if self.profiler is None else self.profiler.before(self.step)
        with self._tracing(phases) as phases:
            out = train_step(
                self.job.strategy, phases, batch.micro_batches, self.loss, targets, self.world.size,
                self.world.device, self.config.train.max_norm,
                None if self.step == self.config.memory.trace_step else meanwhile,
            )  # fmt: skip
        if self.profiler is not None:
            if self.profiler.ends_with(self.step) and meanwhile.done:
                # torch corrupts the heap if its profiler stops while gloo runs a collective that began under it.
                meanwhile(out.loss_sum, out.ended).sums()
            self.profiler.after(self.step)
        return out

    def _tracing(self, phases: Phases) -> AbstractContextManager[Phases]:
        """Trace tensor by tensor if this is the step of `memory.trace_step`."""
        if self.step != self.config.memory.trace_step:
            return nullcontext(phases)
        from ..memory.tracing.compat import TRACKER
        from ..memory.tracing.traced_step import FOLDER, traced_step

        if not TRACKER.works("memory.trace_step"):
            return nullcontext(phases)

        def save(found: dict[str, Any]) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(found) + "\n")

        path = self.run_dir / FOLDER / f"rank{self.world.rank}.json"
        strategy, device = self.job.strategy, self.world.device
        workspace = 0
        if device.type == "cuda":
            asked = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
            workspace = blas_workspace(torch.cuda.get_device_capability(device), asked)
        return traced_step(strategy, strategy.model, phases, device, self.step, save, workspace)

    def _look_ahead(self, batch: StepBatch, loss_sum: HostValue, since: Mark) -> _Ahead:
        """Read the next step's data, and begin the one reduction per step: loss, next step's counts, finiteness,
        requests to save or stop, ownership.

        The device meanwhile works on the step.
        """
        self.watchdog.beat(self.step, "data and reduction")
        wait = None
        if self.step < self.config.train.max_steps:
            batch = next(self.loader)
            wait = since, Mark(self.world.device)
        local = loss_sum.item()
        finite = math.isfinite(local)
        sums = self.world.begin_sum(
            [
                local if finite else 0.0,
                float(not finite),
                *self.job.calls.flags(),
                *self._count(batch),
                float(self.checkpoints.time_is_up()),
                float(self._lost() is not None),
                *self.stop.flags(),
            ]
        )
        self.watchdog.beat(self.step, "backward or update")
        return _Ahead(batch, wait, sums)

    def _agree(self, sums: list[float], targets: float) -> tuple[float, tuple[float, float], bool]:
        """The step's loss, the next step's counts, and whether the loss is finite on every rank, from `_look_ahead`'s
        sums; takes note of requests."""
        total, bad, called, squares, next_targets, next_positions, time_is_up, lost, *stop = sums
        if lost:
            self._give_way()
        self._save_asked = time_is_up > 0
        self.stop.agree(stop)
        self.job.calls.agree(called, squares)
        return total / max(targets, 1.0), (next_targets, next_positions), not bad

    def _unhurried(self) -> AbstractContextManager[None]:
        """Let a save take as long as its files grow on some rank."""
        self.watchdog.beat(self.step, "save")
        saves = self.checkpoints
        return self.watchdog.within(
            Part(saves.standstill_s(), "checkpoint.timeout_s", saves.written_bytes, saves.phase)
        )

    def _limit_saves(self) -> None:
        """Take the times of the run's earlier saves as measured, and say how long the next may stand still."""
        if self.config.run.resume is not False:
            records = read_objects(self.run_dir / "logs" / "checkpoints.jsonl", TAIL)
            timed = [record for record in records if "total_s" in record and not record.get("error")]
            self.checkpoints.remember([float(record["total_s"]) for record in timed])
        if interval := self.checkpoints.describe_default():
            self._say(interval)
        limit_s = self.checkpoints.standstill_s()
        self._say(f"if a save makes no progress for {limit_s:.0f} s, the job ends (checkpoint.timeout_s)")

    def _stop_asked(self) -> bool:
        """Whether some rank was asked to stop; checked before each micro-batch of an evaluation; collective."""
        self.watchdog.beat(self.step, "evaluation")
        lost, *stop = self.world.sum([float(self._lost() is not None), *self.stop.flags()])
        if lost:
            self._give_way()
        self.stop.agree(stop)
        return self.stop.agreed is not None

    def _lost(self) -> str | None:
        """On rank 0 the reason why this run may no longer write to its directory; None if it may, and elsewhere."""
        return None if self.owner is None else self.owner.lost()

    def _give_way(self) -> NoReturn:
        """Another start owns the directory: end all ranks with the same error; collective."""
        (why,) = [str(found) for found in self.world.gather(self._lost()) if found is not None]
        raise superseded(why)

    def _save_due(self) -> bool:
        asked = self._save_asked or self.stop.agreed is not None
        return self.checkpoints.due(self.step, is_last=self.step == self.config.train.max_steps, asked=asked)

    def _save(self, position: State, val_loss: float | None) -> None:
        """Save the state after this step."""
        run = RunState(
            self.step, self.tokens_total, self.config.train.seed, position.epoch, position.next_sample,
            self.schedule.n_samples, val_loss,
            {
                "shuffle": self.config.data.shuffle, "packing": self.config.data.packing, "digests": self._digests(),
                **({"adapter": self.base.about} if self.base else {}),
            },
        )  # fmt: skip
        with doing("save"):
            self.checkpoints.save(run, self.step == self.config.train.max_steps or self.stop.agreed is not None)

    def _note_save(self, report: SaveReport) -> None:
        if self.world.is_main:
            append_jsonl(self.run_dir / "logs" / "checkpoints.jsonl", {**asdict(report), "path": str(report.path)})

    def _count(self, batch: StepBatch) -> list[float]:
        """This rank's targets, and the positions that the model computes for them (0 if the task does not say)."""
        counts = [0 if is_filler else self.task.n_targets(micro) for micro, is_filler in batch.micro_batches]
        self._sums.expect(counts)
        n_positions = getattr(self.task, "n_positions", lambda _: 0)
        return [float(sum(counts)), float(sum(n_positions(micro) for micro, _ in batch.micro_batches))]

    def _set_lr(self) -> float:
        lr = lr_at(self.config.optim, self.step, self.config.train.max_steps)
        for group in self.job.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _gather_due(self, step: int) -> bool:
        return step == 1 or step % self.config.memory.interval == 0 or step == self.config.train.max_steps

    def _gather_memory(self) -> None:
        self.job.ledger.staging_bytes = self.checkpoints.staging_bytes
        rows = self.job.ledger.gather(self.step)
        if rows is not None:
            append_jsonl(self.run_dir / "memory.jsonl", gather_json(self.step, time.time(), rows))

    def _eval_due(self) -> bool:
        every = self.config.train.eval_every
        return self.step == self.config.train.max_steps or (every is not None and self.step % every == 0)

    def _fingerprint(self) -> list[torch.Tensor]:
        """The first elements of each local weight shard, to check that the first step changes them."""
        return [s.local[:256].float().clone() for s in self.job.strategy.shards() if s.name.startswith("model.")]

    def _note_scaling(self, record: dict[str, float]) -> None:
        """fp16: add to a step's record the loss scale, and whether the update was skipped."""
        if self.config.precision.mode != "fp16":
            return
        skipped = not math.isfinite(record["grad_norm"])
        record |= {"loss_scale": self.job.strategy.loss_scale(), "skipped": float(skipped)}
        self.skipped_steps += skipped

    def _check_moved(self, before: list[torch.Tensor], lr: float) -> None:
        self._moved = True
        moved = sum(float(not torch.equal(a, b)) for a, b in zip(before, self._fingerprint(), strict=True))
        if lr > 0 and self.world.sum([moved])[0] == 0:
            raise TrainingError(
                "no parameter changed in the first step, on any rank",
                "check that the loss depends on the model's parameters and that they require gradients",
            )
