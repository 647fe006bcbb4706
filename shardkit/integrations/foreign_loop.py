"""Find out what another tool's training loop trains, and how: its engine, state, precision and batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import nn
from torch.distributed.tensor import DTensor

from ..config.load import LoadedConfig, load_config
from ..errors import ConfigError
from ..memory.probe import local_tensors, module_state
from ..memory.rows import StateKind
from ..oom.shortage import plain_name
from ..strategies.base import Shard
from ..strategies.zero import state as zero_state

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
