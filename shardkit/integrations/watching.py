"""`shardkit.watch`: account for, record and explain the memory of another tool's training loop."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.tensor import DTensor

from ..config.load import LoadedConfig, load_config
from ..config.presets import TASKS
from ..errors import ConfigError, OutOfMemoryError, TrainingError, printable
from ..launch.failures import failure, job_starts
from ..memory.ledger import MemoryLedger
from ..memory.loop_hooks import LoopHooks
from ..memory.probe import local_tensors, module_state
from ..memory.rows import RankRow, StateKind
from ..memory.table import write_jsonl
from ..oom import shortage
from ..oom.postmortem import Advice, PostMortem
from ..oom.shortage import MemoryCap, memory_cap, plain_name
from ..parallel.world import rank_env
from ..run import directory
from ..run.owner import Owner
from ..run.planning import CLAIM, planned_advice, target_of
from ..strategies.base import Shard
from ..strategies.zero import state as zero_state
from ..telemetry.metrics import MetricsWriter, RunProgress


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    run_dir: str | Path,
    every: int = 10,
    model_config: str | Path | None = None,
    cap: str | None = None,
    resume: bool = False,
    done: int | None = None,
    tensorboard: bool = True,
    bars: bool = True,
    total: int | None = None,
    **removed: Any,
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
        model_config: the model's `config.json` or its folder, to plan advice; models of transformers have their own.
        cap: run out of memory at this size, as `memory.cap`: "8GiB".
        resume: continue the records in `run_dir` after `done` steps.
        done: optimizer steps that were taken before; default with `resume`: the last one in `run_dir`.
        tensorboard: whether to write its events.
        bars: whether to draw on a terminal, at most once a second, while no bar of tqdm is open.
        total: the last optimizer step, for the bars, if it is known.

    Raises ConfigError on entering: `run_dir` holds a run, or cannot be written; or there is no optimizer.
    """
    refuse_removed(removed)
    optimizers = () if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    config = None if model_config is None else str(model_config)
    settings = Settings(Path(run_dir), every, resume, done, tensorboard, cap, config, bars=bars, total=total)
    return Watching(model, optimizers, settings)


def refuse_removed(arguments: Mapping[str, Any]) -> None:
    """Answer arguments that earlier releases had; any other unknown one is a TypeError."""
    for name in ("files", "tool"):
        if name in arguments:
            fix = "leave it out: the loop itself is observed, and a model of transformers has its own config"
            raise ConfigError(f"watch() no longer takes {name}", fix)
    if arguments:
        raise TypeError(f"watch() got an unexpected keyword argument {next(iter(arguments))!r}")


@dataclass(frozen=True)
class Settings:
    run_dir: Path
    every: int = 10
    resume: bool = False
    done: int | None = None
    tensorboard: bool = True
    cap: str | None = None
    model_config: str | None = None
    tool_settings: Mapping[str, Any] = field(default_factory=dict)  # what the tool states
    is_marked: bool = False  # whether the caller marks the phases, through `Watching.marks`; else hooks do
    bars: bool = True
    total: int | None = None


class Watching:
    """A loop that is watched; a context manager. See `watch`."""

    ledger: MemoryLedger  # this rank's memory ledger, once entered

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], settings: Settings) -> None:
        if settings.every < 1:
            raise ConfigError(f"watch() got every={settings.every}", "pass the steps between two gathers, 1 or more")
        self._settings, self._ranks = settings, LoopRanks()
        self._loop = ForeignLoop(model, optimizers, self._ranks.rank, self._ranks.size)
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

        `tokens` also gives `tokens_per_s`. A tensor on a GPU is copied without waiting for it. `values`: numbers, or
        tensors of one element.
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
            world = ranks.group, ranks.rank, ranks.size, ranks.local_rank
            self.ledger = MemoryLedger(device, *world, interval=settings.every)
            shortage.observe(device)
            self.ledger.risk.on_risk = lambda row: self._post_mortem(planned=False).at_risk(row)
            if ranks.is_main:
                (path / CLAIM).unlink(missing_ok=True)
                shown = RunProgress(settings.total, steps_before, every=None) if settings.bars else None
                self._records = LoopRecords(
                    MetricsWriter(path, settings.tensorboard, steps_before), self._loop.optimizers[0],
                    None if shown is None else lambda record: shown.update(record, ranks.size, self.rows),
                )  # fmt: skip
                if shown is not None:
                    self._inside.callback(shown.close)
                self._inside.callback(self._records.close)
            self._watch = LoopHooks(
                self.ledger, self._loop.model, self._loop.optimizers, source=self._loop, listener=self,
                steps_before=steps_before,
            )  # fmt: skip
            self._inside.callback(self._watch.unhook)
            (self._watch.begin if settings.is_marked else self._watch.hook)()
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
        Returns the cause and the fix; `None` for other errors.
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

    def _config(self, more: Mapping[str, Any] | None = None) -> ObservedConfig:
        settings = self._settings
        overrides = {"run.dir": str(settings.run_dir), "run.resume": "auto" if settings.resume else False}
        cap = {} if settings.cap is None else {"memory.cap": settings.cap}
        return self._loop.config({**overrides, **settings.tool_settings, **cap, **(more or {})})

    def _describe(self) -> None:
        """Write the observed config to `config.yaml`; a failure is printed and does not end the loop."""
        self._is_described = True
        try:
            directory.write_config(self.run_dir, self._config())
        except (OSError, ConfigError) as error:
            say(f"shardkit: {self.run_dir}/config.yaml is not complete: {printable(str(error).partition(chr(10))[0])}")

    def _post_mortem(self, planned: bool) -> PostMortem:
        config, ranks = self._config().config, self._ranks
        plan = self._planned if planned else None
        return PostMortem(config, self.ledger, self._loop, ranks.local_size, self._cap, plan)

    def _planned(self) -> list[Advice]:
        """Planned changes of a loop that trains a model of transformers with a head that a built-in task has."""
        model_config: Any = next(
            (module.config for module in self._loop.model.modules() if hasattr(module, "config")), None
        )
        described = self._settings.model_config
        heads = [type(module).__name__ for module in self._loop.model.modules()]
        task = next((task for head in heads for end, task in TASKS.items() if head.endswith(end)), None)
        if task is None or (described is None and not hasattr(model_config, "to_json_file")):
            return []
        with tempfile.TemporaryDirectory(prefix="shardkit-") as folder:
            if described is None:
                model_config.to_json_file(described := f"{folder}/config.json")
            config = self._config({"task.name": task, "model.hf_config": described, "model.loss_chunk_size": 0}).config
            cap = config.memory.cap_bytes
            target = target_of(self._loop.device, self._ranks.size, self._ranks.local_size, cap)
            return planned_advice(config, target, self.run_dir)


def _claimed(config: ObservedConfig, ranks: LoopRanks) -> tuple[Path, Owner | None]:
    """Claim the run directory: its path and, on rank 0, its owner. Errors name the arguments of `watch`."""
    try:
        return directory.prepare(config, ranks, exclusive=False)
    except ConfigError as error:
        fix = error.fix if "resume" not in error.fix else "pass resume=True to continue its records, or another run_dir"
        raise ConfigError(error.cause.replace("run.dir=", "run_dir="), fix.replace("run.dir", "run_dir")) from None


class WatchesTrainer:
    """What the callbacks of other trainers share: the options of their constructor, and how watching ends."""

    def __init__(
        self,
        run_dir: str | Path | None = None,  # a new directory; default: `shardkit` in the trainer's own directory
        *,
        every: int = 10,  # every, cap, resume, tensorboard: as for `shardkit.watch`
        cap: str | None = None,
        resume: bool = False,
        tensorboard: bool = True,
    ) -> None:
        self._run_dir, self._every, self._cap = run_dir, every, cap
        self.resumes, self._tensorboard = resume, tensorboard
        self.watching: Watching | None = None

    def watch_settings(self, default_root: str, precision: str | None, **settings: Any) -> Settings:
        """The options as settings, with what the trainer states: its directory and precision, and more."""
        return Settings(
            Path(self._run_dir or Path(default_root) / "shardkit"),
            every=self._every,
            tensorboard=self._tensorboard,
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
    cause = f"shardkit.integrations.{library} needs {library}, which does not import: {error}"
    return ConfigError(cause, f"pip install {library}")


def say(text: str) -> None:
    """Print on stderr: stdout is the loop's own."""
    print(text, file=sys.stderr, flush=True)


class LoopRanks:
    """The ranks of a loop's own process group, with a gloo group beside it."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, 0, 1
        if dist.is_initialized():
            env = rank_env()
            self.rank, self.size = env.rank, env.world_size
            self.local_rank, self.local_size = env.local_rank, env.local_world_size
        elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
            cause = f"watch() was called in one of WORLD_SIZE={os.environ['WORLD_SIZE']} ranks without a process group"
            fix = "call it after torch.distributed.init_process_group, deepspeed.initialize or Accelerator()"
            raise ConfigError(cause, fix)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def join(self) -> None:
        """Make the gloo group; collective."""
        if self.size > 1:
            self.group = dist.new_group(backend="gloo")

    def leave(self) -> None:
        """Close the group: ranks that wait in it learn that this one is gone."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def gather(self, value: object) -> list[object]:
        gathered: list[object] = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered


class LoopRecords:
    """Writes rank 0's record of each step, in order, once the GPU has computed its values."""

    def __init__(
        self, writer: MetricsWriter, optimizer: Any, show: Callable[[Mapping[str, float]], None] | None
    ) -> None:
        self.writer, self._optimizer, self._show = writer, optimizer, show
        self._now: dict[str, Any] | None = None
        self._early: dict[str, Any] = {}
        self._queue: deque[tuple[dict[str, Any], Any]] = deque()
        self._event: Any = None
        self._tokens = 0.0

    def begin(self, step: int, seconds: float, waited: float) -> None:
        """Begin the record of a step that has ended; `add` extends it until the next forward."""
        self.flush()
        self._now = {"step": step, **self._early, "step_time_s": seconds, "data_wait_s": waited}
        self._early = {}
        rate = self._optimizer.param_groups[0].get("lr")
        if isinstance(rate, (int, float)):
            self._now.setdefault("lr", float(rate))

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values to the record of the step that ended, or of the one that runs."""
        into = self._early if self._now is None else self._now
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                into[key] = value.detach().to("cpu", non_blocking=True)
                if value.is_cuda:
                    self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._event.record()
            elif isinstance(value, (int, float)) or hasattr(value, "item"):
                into[key] = float(value)
            else:
                raise TypeError(f"log() got {key} of type {type(value).__name__}; it takes numbers")

    def flush(self) -> None:
        """Close the current record, and write all records whose values have arrived."""
        if self._now is not None:
            self._queue.append((self._now, self._event))
            self._now = self._event = None
        while self._queue and (self._queue[0][1] is None or self._queue[0][1].query()):
            self._write(self._queue.popleft()[0])

    def close(self) -> None:
        self.flush()
        for record, event in self._queue:
            try:
                event.synchronize()
            except RuntimeError:  # the device failed: the values are lost
                break
            self._write(record)
        self.writer.close()

    def _write(self, record: dict[str, Any]) -> None:
        plain = {key: value if key == "step" else float(value) for key, value in record.items()}
        if "tokens" in plain:
            self._tokens += plain["tokens"]
            plain |= {"tokens_total": self._tokens, "tokens_per_s": plain["tokens"] / plain["step_time_s"]}
        self.writer.write(plain)
        if self._show is not None:
            try:
                self._show(plain)
            except OSError:  # the terminal is gone
                self._show = None


# What another tool's training loop trains, and how: its engine, state, precision and batch.

_WRAPPERS = ("accelerate.", "lightning.", "pytorch_lightning.")
_OPTIMIZER = torch.optim.Optimizer
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ADAMS = ("adamw", "adam", "fusedadam", "deepspeedcpuadam")


@dataclass(frozen=True)
class StateTensor:
    """A local tensor of state and its name in a post-mortem."""

    name: str
    local: torch.Tensor


class ObservedConfig(LoadedConfig):
    """The config that a watched loop implies; its YAML lists only the settings that could be observed."""

    def render(self) -> str:
        tree: dict[str, Any] = {}
        for key, source in self.sources.items():
            section, _, name = key.partition(".")
            if source != "default":
                setting = self.config.model_dump(mode="json")[section][name]
                tree.setdefault(section, {})[name] = setting
        return "# What shardkit.watch saw in a loop of another tool.\n" + yaml.safe_dump(tree, sort_keys=False)


class ForeignLoop:
    """Another tool's model and optimizers, seen through the tool's wrappers."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], rank: int, world_size: int) -> None:
        self.model, self._rank, self._world_size = model, rank, world_size
        candidates = list(optimizers)
        if _is_of(model, "deepspeed.runtime.engine"):
            candidates = [model.optimizer]
        self.optimizers = tuple(map(_unwrapped, candidates))
        if not self.optimizers:
            raise ConfigError("watch() got no optimizer: its step ends a training step", "pass it after the model")
        for optimizer in self.optimizers:
            if not callable(getattr(optimizer, "step", None)):
                cause = f"watch() got a {type(optimizer).__name__} where an optimizer belongs"
                raise ConfigError(cause, "pass the model, then its optimizer or a list of them")
        self._zero = next((tool for tool in self.optimizers if _is_of(tool, "deepspeed.runtime.zero")), None)
        self.device = _device(model)
        self.micro_batch: int | None = None
        self.seq_len: int | None = None
        self.accum = 1
        self.autocast: str | None = None

    @property
    def stage(self) -> int | None:
        """ZeRO's stage; `None` without it."""
        return None if self._zero is None else zero_state.stage_of(self._zero)

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        """Every local tensor of parameters, gradients, optimizer state and buffers."""
        if self._zero is not None:
            yield from zero_state.state_of(self._zero, self.model)
            return
        inner = (tool if isinstance(tool, _OPTIMIZER) else getattr(tool, "optimizer", None) for tool in self.optimizers)
        yield from module_state(self.model, *(optimizer for optimizer in inner if isinstance(optimizer, _OPTIMIZER)))

    def shards(self) -> Iterator[StateTensor | Shard]:
        named = {plain_name(name): param for name, param in self.model.named_parameters()}
        if self._zero is not None:
            of_stage = zero_state.zero3_shards if self.stage == 3 else zero_state.zero12_shards
            yield from of_stage(self._zero, {id(param): name for name, param in named.items()}, self._rank)
            return
        for name, param in named.items():
            yield from (StateTensor(f"model.{name}", local) for local in local_tensors(param))
            for optimizer in self.optimizers:
                for key, value in getattr(optimizer, "state", {}).get(param, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield from (StateTensor(f"optim.{name}.{key}", local) for local in local_tensors(value))

    def look(self, inputs: Sequence[Any]) -> None:
        batch = next(_tensors(inputs), None)
        if batch is not None:
            self.micro_batch = batch.shape[0]
            self.seq_len = batch.shape[1] if batch.dim() == 2 and not batch.is_floating_point() else None
        kind = self.device.type
        on = torch.is_autocast_enabled(kind)
        self.autocast = _HALVES.get(torch.get_autocast_dtype(kind)) if on else None

    def settings(self) -> dict[str, Any]:
        """The shardkit settings that can be observed on the loop, by dotted key."""
        settings: dict[str, Any] = {
            "run.device": "cuda" if self.device.type == "cuda" else "cpu",
            "parallel.strategy": self._strategy(),
            "precision.mode": self._precision(),
            "train.grad_accum_steps": self.accum,
        }
        if self.device.type == "cuda" and self._zero is not None:
            settings |= {f"parallel.{key}": "cpu" for key in zero_state.offloaded(self._zero)}
        elif self.device.type == "cuda" and self._strategy() == "fsdp":
            locals_ = (local for param in self.model.parameters() for local in local_tensors(param))
            settings |= (
                {"parallel.offload_param": "cpu"} if any(local.device.type == "cpu" for local in locals_) else {}
            )
        if self.micro_batch:
            settings["train.micro_batch_size"] = self.micro_batch
        if self.seq_len:
            settings["train.seq_len"] = self.seq_len
        if any(getattr(module, "gradient_checkpointing", False) is True for module in self.model.modules()):
            settings["activation.policy"] = "full"
        return settings

    def config(self, settings: Mapping[str, Any]) -> ObservedConfig:
        """The observed config, updated by `settings`; keys that cannot be observed keep defaults, for advice only."""
        settings_seen = {**self.settings(), **settings}
        # Neutral values for settings that the loop does not show, so that no advice is based on them.
        inner = self.optimizers[0]
        inner = inner if isinstance(inner, _OPTIMIZER) else getattr(inner, "optimizer", inner)
        is_adamw = type(inner).__name__.lower() in _ADAMS
        chosen = {"optim.name": "adamw"} if is_adamw else {"optim.name": "sgd", "optim.momentum": 0.0}
        unknown: dict[str, Any] = {"checkpoint.async_save": False, "data.workers": 0, **chosen}
        if self.seq_len and "task.name" not in settings:  # shardkit's own model refuses longer sequences
            unknown["model.max_seq_len"] = self.seq_len
        loaded = load_config(None, {**settings_seen, **unknown})
        hidden = dict.fromkeys(unknown, "default")
        return ObservedConfig(loaded.config, {**loaded.sources, **hidden})

    def _strategy(self) -> str:
        if self.stage is not None:
            return f"zero{self.stage}"
        if any(isinstance(param, DTensor) for param in self.model.parameters()) or any(
            _is_of(module, "torch.distributed.fsdp.fully_sharded_data_parallel") for module in self.model.modules()
        ):
            return "fsdp"
        return "ddp" if self._world_size > 1 else "single"

    def _precision(self) -> str:
        dtypes = {param.dtype for param in self.model.parameters() if param.is_floating_point()}
        half = next((_HALVES[dtype] for dtype in dtypes if dtype in _HALVES), None)
        if half is not None and self.stage is None:
            return "pure_bf16" if half == "bf16" and torch.float32 not in dtypes else self.autocast or "fp32"
        return half or self.autocast or "fp32"


def _is_of(instance: Any, module: str) -> bool:
    return any(kind.__module__.startswith(module) for kind in type(instance).__mro__)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's and Lightning's wrappers, whose own `step` may do nothing or refuse hooks."""
    while type(optimizer).__module__.startswith(_WRAPPERS) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _device(model: nn.Module) -> torch.device:
    """The device that trains the model: a GPU if a parameter is on one or CUDA is in use, else the CPU."""
    devices = {param.device for param in model.parameters()}
    on_card = next((device for device in devices if device.type not in ("cpu", "meta")), None)
    if on_card is None and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())  # its parameters are offloaded
    return on_card or torch.device("cpu")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors with a batch dimension, in nested lists and dicts too."""
    if isinstance(values, torch.Tensor):
        if values.dim():
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
