"""State in the form of checkpoints (elementwise tensors and single numbers), and the methods for it that engines
share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..errors import CheckpointError
from ..memory.probe import module_state
from ..memory.rows import StateKind
from ..parallel.compat import is_persistent
from ..parallel.weights import even_range
from ..parallel.world import World
from .base import Shard, Strategy

_SCALE = "engine.loss_scaler.cur_scale"
_GROWTH = "engine.loss_scaler.growth_tracker"


class TorchStates(Strategy):
    """Methods shared by single, ddp and fsdp, whose optimizer is torch's own over the model's own parameters.

    The methods of a step (`accumulate`, `backward`, `step`) are in the engine's file. Shards here suit engines whose
    ranks hold whole parameters; an engine that shards parameters overrides these methods. `elementwise`: refuse state
    that is not one value per element of its parameter, since each rank holds a shard.
    """

    elementwise = False
    _bare: nn.Module
    """The model without the engine's wrapper; its names are those in checkpoints."""
    _world: World
    _scaler: GradScaler

    def loss_scale(self) -> float:
        return self._scaler.get_scale()

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        return module_state(self._bare, self.optimizer)

    def shards(self) -> Iterator[Shard]:
        return self._even_shards(self._world.rank, self._world.size)

    def load_targets(self) -> Iterator[Shard]:
        return self._even_shards(0, 1)

    def _even_shards(self, part: int, parts: int) -> Iterator[Shard]:
        """One of `parts` even ranges of each tensor."""
        for fqn, param in self._bare.named_parameters():
            start, end = even_range(param.numel(), part, parts)
            yield Shard(f"model.{fqn}", tuple(param.shape), start, flat(fqn, param)[start:end])
            for key, value in state_parts(param, self.optimizer.state.get(param, {})):
                state_start, state_end = even_range(value.numel(), part, parts)
                yield Shard(
                    f"optim.{fqn}.{key}", tuple(value.shape), state_start, flat(fqn, value)[state_start:state_end]
                )
        yield from buffer_shards(self._bare, part)

    def create_optimizer_state(self, stateless: Collection[str] = ()) -> None:
        names = {id(param): fqn for fqn, param in self._bare.named_parameters()}
        for group in self.optimizer.param_groups:
            for param in group["params"]:  # one at a time: only one gradient exists
                if names.get(id(param)) in stateless:
                    self.optimizer.state.pop(param, None)
                else:
                    create_states(self.optimizer, group, param)

    def scalars(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        if self._scaler.is_enabled():
            numbers = {_SCALE: self._scaler.get_scale(), _GROWTH: self._scaler.state_dict()["_growth_tracker"]}
        for fqn, param in self._bare.named_parameters():
            numbers |= scalars_of(fqn, param, self.optimizer.state.get(param, {}), self.elementwise)
        return numbers

    def after_load(self, scalars: Mapping[str, float]) -> None:
        if self._scaler.is_enabled() and _SCALE in scalars:  # else the saved run had no scaler: keep the fresh one
            saved = {"scale": scalars[_SCALE], "_growth_tracker": int(scalars.get(_GROWTH, 0))}
            self._scaler.load_state_dict({**self._scaler.state_dict(), **saved})
        for fqn, param in self._bare.named_parameters():
            set_scalars(fqn, param, self.optimizer.state.get(param, {}), scalars)

    def teardown(self) -> None:
        vars(self).clear()  # a wrapped model that outlives its process group can abort the process at exit


def with_scalars(shards: Iterator[Shard], scalars: Collection[str]) -> Iterator[Shard]:
    """The shards, with shape () restored for 0-d parameters that an engine holds with shape [1]."""
    for shard in shards:
        fqn = shard.name.partition(".")[2]
        yield replace(shard, shape=()) if fqn in scalars or fqn.rpartition(".")[0] in scalars else shard


def is_scalar(key: str, value: object, param: torch.Tensor) -> bool:
    """Whether an optimizer state is one number (a step counter), as a Python number or a 0-d tensor. The moments of a
    0-d parameter are tensors of its shape, not numbers."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and (param.dim() > 0 or key == "step")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def state_parts(param: torch.Tensor, state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, tensor) of every state that is not one number; a wrapper (8-bit states) gives its inner tensors."""
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or is_scalar(key, value, param):
            continue
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None or type(value) in (torch.Tensor, nn.Parameter):
            yield key, value
            continue
        for name in flatten()[0]:
            yield f"{key}.{name}", getattr(value, name)


def scalars_of(fqn: str, param: torch.Tensor, state: Mapping[str, Any], elementwise: bool = True) -> dict[str, float]:
    """`optim.<fqn>.<key>` of every state that is one number."""
    numbers: dict[str, float] = {}
    for key, value in state.items():
        if is_scalar(key, value, param):
            number = value.item() if isinstance(value, torch.Tensor) else value
            numbers[f"optim.{fqn}.{key}"] = int(number) if float(number).is_integer() else float(number)
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and elementwise:  # a plain tensor with one value for each element of its parameter
            local = value.to_local() if hasattr(value, "to_local") else value
            is_savable = value.shape == param.shape and type(local) in (torch.Tensor, nn.Parameter)
        else:
            is_savable = value is None or is_tensor
        if not is_savable:
            kind = f"a tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise CheckpointError(
                f"optimizer state {key!r} of {fqn} is {kind}, neither one number nor one value per element of the "
                "parameter",
                "use an elementwise optimizer (adamw, sgd), or turn checkpoints off: checkpoint.at_end=false",
            )
    return numbers


def set_scalars(fqn: str, param: torch.Tensor, state: dict[str, Any], scalars: Mapping[str, float]) -> None:
    """Write saved numbers into a parameter's existing state."""
    for key, value in state.items():
        if not is_scalar(key, value, param):
            continue
        name = f"optim.{fqn}.{key}"
        if name not in scalars:
            raise CheckpointError(f"the checkpoint has no {name}", "resume with the optimizer it was made with")
        if isinstance(value, torch.Tensor):
            value.fill_(scalars[name])
        else:
            state[key] = type(value)(scalars[name])


@torch.no_grad()
def create_states(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor) -> None:
    """Make the optimizer create a parameter's state as in its first step, with lr 0 and gradient 0: no weight changes.

    The values of the new state are meaningless: a load overwrites all of them.
    """
    if optimizer.state.get(param):
        return
    groups, grad = optimizer.param_groups, param.grad
    if grad is None:
        param.grad = torch.zeros_like(param)
    try:
        optimizer.param_groups = [{**group, "params": [param], "lr": 0.0}]
        optimizer.step()
    finally:
        optimizer.param_groups, param.grad = groups, grad


def flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of a tensor."""
    if not tensor.is_contiguous():
        raise CheckpointError(
            f"{name} is not contiguous: strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            "make it contiguous when the model is built; channels_last parameters cannot be saved",
        )
    return tensor.detach().view(-1)


def buffer_shards(model: nn.Module, rank: int) -> Iterator[Shard]:
    """Persistent buffers (batch-norm statistics): every rank holds them; rank 0's are saved."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not is_persistent(module, name) or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            fqn = f"{prefix}.{name}" if prefix else name
            yield Shard(f"buffer.{fqn}", tuple(buffer.shape), 0, flat(fqn, buffer), replica=rank)
