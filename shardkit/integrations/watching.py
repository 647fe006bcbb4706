"""`shardkit.watch`: account for, record and explain the memory of another tool's training loop."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError, OutOfMemoryError, TrainingError, printable
from ..foreign.advice import LIMIT_S, ToolKeys
from ..foreign.phrases import Tool
from ..foreign.translate import ForeignJob, read_job
from ..launch.failures import failure, job_starts
from ..memory.ledger import MemoryLedger
from ..memory.loop_hooks import LoopHooks
from ..memory.rows import RankRow
from ..memory.table import write_jsonl
from ..oom import shortage
from ..oom.advice import Advice
from ..oom.cap import MemoryCap, memory_cap
from ..oom.postmortem import PostMortem
from ..parallel.blocks import find_blocks
from ..run import directory
from ..run.owner import Owner
from ..run.planning import target_of
from ..telemetry.metrics import MetricsWriter
from ..telemetry.progress import RunProgress
from .foreign_loop import ForeignLoop, ObservedConfig
from .ranks import LoopRanks
from .step_records import LoopRecords

PLANNING = ".shardkit/planning"
"""The file by which the first rank that runs out of memory claims the planning of advice."""


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    run_dir: str | Path,
    every: int = 10,
    files: Sequence[str | Path] = (),
    model_config: str | Path | None = None,
    cap: str | None = None,
    resume: bool = False,
    done: int | None = None,
    tensorboard: bool = True,
    bars: bool = True,
    total: int | None = None,
    tool: Tool = "torch",
) -> Watching:
    """Account for the memory of a loop of any tool, and explain its out-of-memory errors.

        with shardkit.watch(model, optimizer, run_dir="runs/mine") as watching:
            for batch in batches:
                ...                          # the loop as it is
                watching.log(loss=loss)      # if the record should have it

    Entering is collective. Rank 0 writes `metrics.jsonl`, `memory.jsonl` and TensorBoard's events into `run_dir`, which
    `shardkit report` shows, draws bars of every rank's memory on a terminal, and prints them as a table at the end.
    Nothing waits for the device. Every rank must take the same number of optimizer steps.

    Args:
        model: the module that the loop calls: plain, DDP, FSDP2, compiled, or DeepSpeed's engine.
        optimizer: its optimizer, or a list of them in the order of their steps; DeepSpeed's engine has its own.
        run_dir: a new directory.
        every: optimizer steps between two gathers of every rank's memory.
        files: the loop's config files (Accelerate's, DeepSpeed's, the Trainer's): advice is then planned.
        model_config: the model's `config.json` or its folder, for these plans.
        cap: run out of memory at this size, as `memory.cap`: "8GiB".
        resume: continue the records in `run_dir` after `done` steps.
        done: optimizer steps that were taken before; default with `resume`: the last one in `run_dir`.
        tensorboard: whether to write its events.
        bars: whether to draw on a terminal, at most once a second, while no bar of tqdm is open.
        total: the last optimizer step, for the bars, if it is known.
        tool: advice is said in the keys of this tool.

    Raises:
        ConfigError: (on entering) `run_dir` holds a run, or cannot be written; a file cannot be read; no optimizer.
    """
    optimizers = () if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    names = tuple(str(file) for file in files)
    config = None if model_config is None else str(model_config)
    settings = Settings(
        Path(run_dir), every, resume, done, tensorboard, tool, cap, names, config, bars=bars, total=total
    )
    return Watching(model, optimizers, settings)


@dataclass(frozen=True)
class Settings:
    """The arguments of `watch` after the model and its optimizers.

    Attributes:
        tool_settings: shardkit settings that the tool states and that cannot be observed on the model.
        contents: the tool's settings, in objects that `read_job` takes; called if memory runs out.
        is_marked: whether the caller marks the phases, through `Watching.marks`; else hooks do.
    """

    run_dir: Path
    every: int = 10
    resume: bool = False
    done: int | None = None
    tensorboard: bool = True
    tool: Tool = "torch"
    cap: str | None = None
    files: tuple[str, ...] = ()
    model_config: str | None = None
    tool_settings: Mapping[str, Any] = field(default_factory=dict)
    contents: Callable[[], Sequence[Any]] | None = None
    is_marked: bool = False
    bars: bool = True
    total: int | None = None


class Watching:
    """A loop that is watched; a context manager. See `watch`.

    Attributes:
        ledger: this rank's memory ledger, once entered.
    """

    ledger: MemoryLedger

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], settings: Settings) -> None:
        if settings.every < 1:
            raise ConfigError(f"watch() got every={settings.every}", "pass the steps between two gathers, 1 or more")
        self._settings, self._ranks = settings, LoopRanks()
        self._loop = ForeignLoop(model, optimizers, self._ranks.rank, self._ranks.size)
        if settings.files:  # an unreadable file is an error now, not once memory has run out
            read_job(settings.files, settings.model_config, self._ranks.size)
        self._inside = ExitStack()
        self._records: LoopRecords | None = None
        self._is_open = self._is_broken = self._is_described = False
        self._cap: MemoryCap | None = None
        self._owner: Owner | None = None
        self._forwards = 0

    @property
    def run_dir(self) -> Path:
        return self._settings.run_dir

    @property
    def marks(self) -> LoopHooks:
        """Where the caller marks the phases, if no hooks do."""
        return self._watch

    @property
    def rows(self) -> list[RankRow]:
        """Rank 0: every rank's row at the last gather; empty elsewhere."""
        return self.ledger.last_rows

    def table(self, width: int | None = None) -> str:
        """The last gather as a table; empty on ranks other than 0."""
        return self.ledger.table(width)

    def log(self, **values: Any) -> None:
        """Add values to the record of the step whose first forward began last; on rank 0, nothing elsewhere.

        `tokens` also gives `tokens_per_s`. A tensor on a GPU is copied without waiting for it.

        Args:
            values: numbers, or tensors of one element.

        Raises:
            TypeError: a value is neither.
        """
        if self._records is not None:
            self._records.add(values)

    def __enter__(self) -> Watching:
        self.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.explain(error)
        self.close(failed=error is not None)

    def open(self) -> None:
        """Join the other ranks, claim the run directory and begin; collective."""
        settings, ranks, device = self._settings, self._ranks, self._loop.device
        ranks.join()
        self._inside.callback(ranks.leave)
        try:
            config = self._config()
            path, self._owner = _claimed(config, ranks)
            if self._owner is not None:
                self._inside.enter_context(self._owner)
            steps_before = settings.done or 0
            if settings.resume:
                if settings.done is None:
                    steps_before = int(str(ranks.gather(job_starts.last_step(path))[0]))
                directory.go_on(config, ranks, path, steps_before)
            self._cap = self._inside.enter_context(memory_cap(config.config.memory.cap_bytes, device))
            if self._cap is not None:
                self._cap.see([tensor for _, tensor in self._loop.state_tensors()])
            self.ledger = MemoryLedger(
                device, ranks.group, ranks.rank, ranks.size, ranks.local_rank, interval=settings.every
            )
            shortage.observe(device)
            self.ledger.risk.on_risk = lambda row: self._post_mortem(planned=False).at_risk(row)
            if ranks.is_main:
                (path / PLANNING).unlink(missing_ok=True)
                shown = RunProgress(settings.total, steps_before, every=None) if settings.bars else None
                self._records = LoopRecords(
                    MetricsWriter(path, settings.tensorboard, steps_before), self._loop.optimizers[0],
                    None if shown is None else lambda record: shown.update(record, ranks.size, self.rows),
                )  # fmt: skip
                if shown is not None:
                    self._inside.callback(shown.close)
                self._inside.callback(self._records.close)
            self._watch = LoopHooks(
                self.ledger,
                self._loop.model,
                self._loop.optimizers,
                source=self._loop,
                listener=self,
                steps_before=steps_before,
            )
            self._inside.callback(self._watch.unhook)
            if settings.is_marked:
                self._watch.begin()
            else:
                self._watch.hook()
        except BaseException:
            self._inside.close()
            raise
        self._is_open = True

    def close(self, failed: bool = False) -> None:
        """Gather once more unless the loop failed, print the table on rank 0, and release everything; collective."""
        if not self._is_open:
            return
        self._is_open = False
        with self._inside:
            self._watch.unhook()
            if failed:
                return
            self._watch.gather_last()
            if self.rows:
                say(f"{self.table()}\n  look at the run: shardkit report {self.run_dir}")

    def explain(self, error: BaseException) -> OutOfMemoryError | None:
        """If memory ran out, write `RUN_DIR/oom/rank{r}.json` and print cause and fix; the error itself stays.

        The two lines become a note of the error, the last lines of its traceback (Python 3.10: they are printed).

        Returns:
            The cause and the fix; `None` for other errors.
        """
        if not self._is_open:
            return None
        if self._records is not None and not self._is_described:
            self._describe()
        try:
            explained = self._post_mortem(planned=True).explain(error)
        except Exception as problem:  # an exception from here would replace the error itself
            say(f"shardkit: the error cannot be explained: {printable(f'{type(problem).__name__}: {problem}')}")
            return None
        if explained is None:
            return None
        text = "\n".join(printable(line) for line in f"shardkit: {explained}".split("\n"))
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            say(text)
        failure.record(explained)
        return explained

    # What `LoopHooks` calls

    def forward_begins(self, inputs: tuple[Any, ...]) -> None:
        self._loop.look(inputs)
        self._forwards += 1
        if self._records is not None and self._forwards == 1:
            self._records.flush()

    def step_ended(self, step: int, seconds: float, waited: float) -> None:
        self._loop.accum, self._forwards = max(1, self._forwards), 0
        if self._records is not None and self._owner is not None and (lost := self._owner.lost()):
            say(f"shardkit: nothing more is recorded: {printable(lost)}")
            self._records = None
        if self._records is not None:
            self._records.begin(step, seconds, waited)
            if not self._is_described:  # the batch's sizes are known only after a step
                self._describe()

    def gather(self, step: int) -> None:
        if self._is_broken:
            return
        try:
            rows = self.ledger.gather(step)
        except (TrainingError, RuntimeError) as error:  # accounting never ends somebody's training
            self._is_broken = True
            self._ranks.leave()  # the others need not wait for this rank
            cause = error.cause if isinstance(error, TrainingError) else str(error).partition("\n")[0]
            say(f"shardkit: memory is no longer gathered: {printable(cause)}")
            return
        if rows is not None and self._records is not None:
            write_jsonl(self.run_dir / "memory.jsonl", step, rows)
            self._records.writer.write_memory(step, rows)

    def _config(self) -> ObservedConfig:
        settings = self._settings
        overrides = {
            "run.dir": str(settings.run_dir),
            "run.resume": "auto" if settings.resume else False,
            **settings.tool_settings,
        }
        if settings.cap is not None:
            overrides["memory.cap"] = settings.cap
        return self._loop.config(overrides)

    def _describe(self) -> None:
        """Write the observed config to `config.yaml`; a failure is printed and does not end the loop."""
        self._is_described = True
        try:
            directory.write_config(self.run_dir, self._config())
        except (OSError, ConfigError) as error:
            say(f"shardkit: {self.run_dir}/config.yaml is not complete: {printable(str(error).partition(chr(10))[0])}")

    def _post_mortem(self, planned: bool) -> PostMortem:
        config, model, ranks = self._config().config, self._loop.model, self._ranks
        has_checkpointing = any(hasattr(module, "gradient_checkpointing_enable") for module in model.modules())
        tool_keys = ToolKeys(self._settings.tool, config.parallel.strategy, has_checkpointing)
        return PostMortem(
            config, self.ledger, self._loop, ranks.local_size, self._cap,
            lambda model: len(find_blocks(model)), self._loop.buffers,
            lambda advice: tool_keys.words(advice, self._loop.smaller_buckets()),
            (lambda advice: self._planned(tool_keys, advice)) if planned else None,
        )  # fmt: skip

    def _planned(self, tool_keys: ToolKeys, advice: list[Advice]) -> list[Advice]:
        """Plan the advice if this is the first rank that ran out of memory; else return it unplanned."""
        with tempfile.TemporaryDirectory(prefix="shardkit-") as folder:
            job = self._job(Path(folder))
            if job is None or not _is_first_to_plan(self.run_dir / PLANNING):
                return advice
            if job.not_planned:
                say(f"shardkit: no change is planned: {'; '.join(job.not_planned)}")
                return advice
            say(f"shardkit: planning changes that would make room, {LIMIT_S:g} s at most")
            seen, cap = self._loop.settings(), self._config().config.memory.cap_bytes
            keys = [key for key in ("train.seq_len", "train.micro_batch_size") if key not in job.settings]
            keys += ["run.device"] if seen["run.device"] == "cpu" else []
            overrides = [f"{key}={seen[key]}" for key in keys if key in seen]
            target = target_of(self._loop.device, self._ranks.size, self._ranks.local_size, cap)
            return tool_keys.planned(advice, job, target, overrides)

    def _job(self, folder: Path) -> ForeignJob | None:
        """The job that the tool's files and objects describe; a model config without a file is written to `folder`."""
        contents = self._settings.contents
        names = [*self._settings.files, *(() if contents is None else contents())]
        described = self._settings.model_config
        model_config: Any = next(
            (module.config for module in self._loop.model.modules() if hasattr(module, "config")), None
        )
        if described is None and hasattr(model_config, "to_json_file"):
            model_config.to_json_file(folder / "config.json")
            described = str(folder / "config.json")
        return read_job(names, described, self._ranks.size) if names and described is not None else None


def _claimed(config: ObservedConfig, ranks: LoopRanks) -> tuple[Path, Owner | None]:
    """Claim the run directory: its path and, on rank 0, its owner. Errors name the arguments of `watch`."""
    try:
        return directory.prepare(config, ranks, exclusive=False)
    except ConfigError as error:
        fix = error.fix if "resume" not in error.fix else "pass resume=True to continue its records, or another run_dir"
        raise ConfigError(error.cause.replace("run.dir=", "run_dir="), fix.replace("run.dir", "run_dir")) from None


class WatchesTrainer:
    """What the callbacks of other trainers share: the options of their constructor, and how watching ends.

    Args:
        run_dir: a new directory; default: `shardkit` in the trainer's own directory.
        every, cap, resume, tensorboard: as for `shardkit.watch`.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        every: int = 10,
        cap: str | None = None,
        resume: bool = False,
        tensorboard: bool = True,
    ) -> None:
        self._run_dir, self._every, self._cap = run_dir, every, cap
        self.resumes, self._tensorboard = resume, tensorboard
        self.watching: Watching | None = None

    def watch_settings(self, tool: Tool, default_root: str, precision: str | None, **settings: Any) -> Settings:
        """The options as settings, with what the trainer states: its tool's name, directory and precision, and more."""
        return Settings(
            Path(self._run_dir or Path(default_root) / "shardkit"),
            every=self._every,
            tensorboard=self._tensorboard,
            tool=tool,
            cap=self._cap,
            tool_settings={} if precision is None else {"precision.mode": precision},
            **{"resume": self.resumes, **settings},
        )

    def end_watching(self, failed: bool = False) -> None:
        """Gather a last time, unless `failed`, and print the table; a second call does nothing."""
        if self.watching is not None:
            self.watching.close(failed)
            self.watching = None


def missing(library: str, error: ImportError) -> ConfigError:
    """The error of an integration whose library does not import."""
    return ConfigError(
        f"shardkit.integrations.{library} needs {library}, which does not import: {error}", f"pip install {library}"
    )


def say(text: str) -> None:
    """Print on stderr: stdout is the loop's own."""
    print(text, file=sys.stderr, flush=True)


def _is_first_to_plan(path: Path) -> bool:
    """Whether this rank is the first to ask: the first one creates the file."""
    try:
        path.touch(exist_ok=False)
    except OSError:
        return False
    return True
