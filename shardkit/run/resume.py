"""Where a run starts, with which weights and from which checkpoint, and what it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.frozen_base import FrozenBase, check_adapter
from ..checkpoint.native.manifest import RunState
from ..checkpoint.quantized_base import describe, drawing, fill_quantized, reading, weight_shapes
from ..checkpoint.resume import candidates
from ..checkpoint.save import Checkpointer, SaveReport
from ..config.schema import RunConfig
from ..data.loader import State
from ..errors import CheckpointError, ConfigError, DataError, gib
from ..files import TAIL, append_jsonl, read_objects
from ..memory.probe import doing
from ..parallel.weights import Weights
from ..tasks.base import Task
from . import directory
from .job import Job
from .watchdog import Part, Watchdog

if TYPE_CHECKING:
    from ..checkpoint.formats.tensor_source import Source


class StartingPoint:
    """The start of a run: new weights, those of `model.init_from`, or a checkpoint that suits the run.

    `n_samples`: of the training split. `digests`: of the data that the task names.
    """

    def __init__(self, job: Job, task: Task, run_dir: Path, n_samples: int, digests: Mapping[str, str]) -> None:
        self._job, self._task, self._run_dir = job, task, run_dir
        self._n_samples, self._digests = n_samples, digests
        self._adapter = getattr(task, "adapter", None)
        self.base: FrozenBase | None = None  # the model under the task's adapter; `None` if the whole model is trained
        # whether every weight comes from a checkpoint or from `model.init_from`, so that none is drawn.
        self.loads_weights = self._will_load()

    def _will_load(self) -> bool:
        """Whether there is something to load all weights from; collective."""
        config, world = self._job.config, self._job.world
        if self._adapter is not None:  # files hold either the adapter or the model under it
            return False
        if config.model.init_from is not None or config.run.source is not None:
            return True
        has_checkpoint = False
        with suppress(OSError):  # `resume` raises it on every rank
            has_checkpoint = config.run.continues and world.is_main and bool(candidates(self._run_dir))
        return world.sum([float(has_checkpoint)])[0] > 0

    def freeze_base(self, say: Callable[[str], None]) -> None:
        """Set `base`, once the model is wrapped."""
        config, adapter = self._job.config, self._adapter
        if adapter is not None:
            self.base = FrozenBase(self._job.model, adapter.settings, adapter.base_name, config.model.init_from)
            say(f"adapter: {config.adapter.type} on {adapter.targets_text}, {self.base.line}")
            if adapter.quantizer is not None:
                say(describe(self._job.model, adapter.quantizer, adapter.quantizer.settings.type))

    def resume(self, checkpoints: Checkpointer) -> RunState:
        """Load the weights, and the checkpoint that `run.resume` asks for; returns the state of the run then."""
        run, world, base = self._job.config.run, self._job.world, self.base
        if run.resume is False or base is not None:
            self.fill(checkpoints)
        if run.resume is False:
            return RunState(step=0)
        loaded = checkpoints.resume(run.source or self._run_dir, self._accept)
        if loaded is None:
            config = self._job.config
            if config.run.source is not None:
                raise CheckpointError(
                    f"run.resume={config.run.source}: there is no checkpoint", "name a checkpoint, or a run with one"
                )
            if self.loads_weights and config.model.init_from is None:
                cause = f"the checkpoints in {self._run_dir} vanished while the run started"
                raise CheckpointError(cause, "start it again")
            if base is None:
                self.fill(checkpoints)
        path, state = loaded or (None, RunState(step=0))
        directory.go_on(self._job.loaded, world, self._run_dir, state.step)
        if world.is_main:
            source = f"from {path}, step {state.step}" if path else "from the start: there is no checkpoint yet"
            print(f"resuming {source}", flush=True)
        return state

    def fill(self, checkpoints: Checkpointer) -> None:
        """Load the weights that `model.init_from` names, pack what the model holds packed, and identify the base."""
        from ..checkpoint.formats.start import opening

        init_from, base = self._job.config.model.init_from, self.base
        with nullcontext() if init_from is None else opening(init_from, self._job.model) as open_source:
            if open_source is not None:
                self._take_weights(checkpoints, open_source)
            if base is not None:
                base.identify(self._job.strategy, checkpoints.group, self._pack(base, checkpoints, open_source))

    def _take_weights(self, checkpoints: Checkpointer, open_source: Callable[[], Source]) -> None:
        from ..checkpoint.formats.start import load_weights

        world = self._job.world
        file_name = self._adapter.file_name if self._adapter else str
        resized = getattr(self._task, "resized", ())
        quantizer = self._adapter.quantizer if self._adapter else None
        loaded = load_weights(
            self._job.strategy, world, checkpoints.group, open_source, file_name, resized,
            {} if quantizer is None else weight_shapes(quantizer),
        )  # fmt: skip
        if world.is_main:
            read = f" ({gib(loaded.bytes_read)} read)" if loaded.bytes_read else ""
            print(f"starting with the weights of {loaded.path}{read}", flush=True)
            for name, (old, new) in loaded.resized.items():
                print(f"{name}: {old} rows, and {new - old} new ones with their mean", flush=True)

    def _pack(
        self, base: FrozenBase, checkpoints: Checkpointer, open_source: Callable[[], Source] | None
    ) -> dict[str, int]:
        """Read or draw the weights that the model holds packed; returns their checksums."""
        adapter, job = self._adapter, self._job
        if adapter is None or adapter.quantizer is None:
            return {}
        config, quantizer, base_name = job.config, adapter.quantizer, adapter.base_name
        if open_source is None:
            weights = Weights(config.train.seed, self._task.init_parameter)  # type: ignore[attr-defined]
            open_reader = drawing(weights, quantizer, base_name)
        else:
            open_reader = reading(open_source, quantizer, base_name)
        return fill_quantized(
            job.strategy, job.model, job.world, checkpoints.group, quantizer, base_name, open_reader, base.dtype
        )

    def about(self) -> dict[str, Any]:
        """What a checkpoint of this run holds for `_accept`, beside its seed and number of samples."""
        data = self._job.config.data
        about = {"shuffle": data.shuffle, "packing": data.packing, "digests": dict(self._digests)}
        return about | ({"adapter": self.base.about} if self.base else {})

    def _accept(self, saved: RunState) -> None:
        """Refuse a checkpoint whose data, data order or adapter are not those of this run."""
        config = self._job.config
        seed = config.train.seed
        if saved.seed != seed and "imported" not in saved.extra:  # another tool's data order does not apply here
            raise ConfigError(
                f"train.seed={seed}, but the checkpoint's is {saved.seed}", f"set train.seed={saved.seed}"
            )
        packing = saved.extra.get("packing")
        if packing not in (None, config.data.packing):
            raise ConfigError("data.packing differs from the checkpoint's", f"set data.packing={packing}")
        for name, digest in (saved.extra.get("digests") or {}).items():
            present = self._digests.get(name)
            if present != digest:
                raise DataError(
                    f"the {name} is not the one that the checkpoint was trained with: digest {present or 'none'}, then "
                    f"{digest}",
                    f"resume with the same {name}, and with train.eval_samples=0 only if it was 0 then; to go on with "
                    "another, start from the weights: model.init_from=RUN",
                )
        if saved.n_samples not in (None, self._n_samples):
            raise DataError(
                f"the training split has {self._n_samples} samples, it had {saved.n_samples} when the checkpoint was "
                "made",
                "resume with the same data, train.seq_len, data.val_fraction and train.eval_samples (0 trains on all)",
            )
        check_adapter(self.base, saved.extra.get("adapter"))
        shuffle = saved.extra.get("shuffle")
        if shuffle not in (None, config.data.shuffle):
            raise ConfigError("data.shuffle differs from the checkpoint's", f"set data.shuffle={shuffle}")


# When the run saves, how long a save may take, and what a checkpoint holds beside the tensors.


def save_log(run_dir: Path) -> Path:
    """The file with one line for each save."""
    return run_dir / "logs" / "checkpoints.jsonl"


def note_save(run_dir: Path, report: SaveReport) -> None:
    """Record a finished save, on rank 0."""
    append_jsonl(save_log(run_dir), {**asdict(report), "path": str(report.path)})


class Saves:
    """The saves of a run. `about`: what a resume compares: see `RunState.extra`. `n_samples`: of the training split."""

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
