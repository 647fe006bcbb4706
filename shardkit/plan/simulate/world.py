"""A world of ranks that is not there: fake tensors, a process group that answers at once, engines told to cope."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ...launch.ranks.env import RankEnv
from ...parallel.weights import Weights
from ...parallel.world import World
from .compat import (
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    deepspeed_alone,
    fused_adamw,
    own_apply,
    register_collectives,
    torch_on_fakes,
    transformers_in_training,
    unset_fake_temporarily,
)
from .ddp import StandInDDP
from .shim import ConstantItems


@contextmanager
def fake_world(
    device: torch.device, world_size: int, ranks_per_node: int, rank: int = 0, zero: bool = False
) -> Iterator[World]:
    """Be one of `world_size` ranks while inside; every tensor made there is fake.

    Args:
        device: where the model would train.
        zero: DeepSpeed takes part.
    """
    local = min(ranks_per_node, world_size)
    env = RankEnv(rank, world_size, rank % local, local, rank // local, -(-world_size // local), "group")
    # Left standing: DeepSpeed keeps groups for as long as its process lives.
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise RuntimeError("a process can pretend to be one rank of one world only")
    register_collectives()
    group = dist.group.WORLD
    assert group is not None
    with ExitStack() as stack:
        stack.enter_context(_Fakes(allow_non_fake_inputs=True))
        stack.enter_context(ConstantItems())
        stack.enter_context(patch("shardkit.strategies.ddp.Wrapped", StandInDDP))
        # Which ranks used what is not known here: as if all used all.
        stack.enter_context(patch("shardkit.strategies.fsdp.FSDP.forget_unused", lambda strategy: None))
        stack.enter_context(patch("shardkit.strategies.fsdp.init_device_mesh", _real_mesh))
        stack.enter_context(torch_on_fakes(_apply_to_fakes, _Chunks, _move_fakes, _step_all_the_same))
        if zero:
            stack.enter_context(deepspeed_alone(_CPUAdam))
            stack.enter_context(patch("shardkit.strategies.zero.engine.build_cpu_adam", lambda world: None))
        stack.enter_context(transformers_in_training())
        yield World(env, device, group, group)


class _Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Never touches a device, whatever `torch.cuda.is_available` is made to say."""

    avoid_device_init = True


def _real_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
    """A mesh is made of real numbers."""
    with unset_fake_temporarily():
        return init_device_mesh(*args, **kwargs)


def _apply_to_fakes(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """`Module._apply` that keeps every parameter the object it is: torch does not swap fakes that are referred to."""
    if any(isinstance(param, DTensor) for param in self.parameters()):  # FSDP2 takes over its shards itself
        return own_apply(self, fn, recurse)  # type: ignore[no-any-return]
    for module in self.modules() if recurse else (self,):
        for param in module.parameters(recurse=False):
            _set_data(param, fn(param))
            if param.grad is not None:
                _set_data(param.grad, fn(param.grad))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, fn(buffer))
    return self


def _move_fakes(params: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], device: torch.device) -> None:
    """FSDP2's way to the device for a model that was not built on meta: setting `data` leaves a fake where it says."""
    for tensor in (*params, *buffers):
        if tensor.device != device and not tensor.is_meta:
            _set_data(tensor, tensor.to(device))


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if value is not tensor:
        with torch.no_grad():
            tensor.data = value.detach()
        if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device


def _step_all_the_same(self: GradScaler, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """A step that loss scaling does not skip: a fake count of infinities says 1."""
    return optimizer.step(*args, **kwargs)


class _CPUAdam(torch.optim.Optimizer):
    """DeepSpeedCPUAdam's states, made in the first step as it makes them; another kernel that works in place."""

    def __init__(self, groups: Any, adamw_mode: bool, fp32_optimizer_states: bool, **settings: Any) -> None:
        super().__init__(groups, {**settings, "amsgrad": False})
        self.fp32_optimizer_states = fp32_optimizer_states

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    dtype = torch.float32 if self.fp32_optimizer_states else param.dtype
                    state["step"] = 1
                    state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
                fused_adamw(param, param.grad, state["exp_avg"], state["exp_avg_sq"])


class _Chunks:
    """Pieces of a parameter, made when asked for: of a thousand ranks' only this one's is."""

    def __init__(self, tensor: torch.Tensor, n_chunks: int, dim: int) -> None:
        self._tensor, self._n, self._dim = tensor, n_chunks, dim
        self._rows = -(-tensor.size(dim) // n_chunks) if tensor.size(dim) else 0

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> torch.Tensor:
        start, size = index * self._rows, self._tensor.size(self._dim)
        if start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._rows, size - start))


class FakeWeights(Weights):
    """Weights without values."""

    def draw(self, fqn: str, shape: torch.Size) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32)

    def materialise(self, model: nn.Module, device: torch.device) -> None:
        """Put the model on the device; `Module.to` cannot swap fake parameters that something refers to weakly."""
        made: dict[int, Any] = {}
        for module in model.modules():
            held = (module.named_parameters(recurse=False, remove_duplicate=False), True), (
                module.named_buffers(recurse=False, remove_duplicate=False), False,
            )  # fmt: skip
            for named, is_param in held:
                for name, tensor in list(named):
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _moved(tensor, device, is_param)
                    setattr(module, name, made[id(tensor)][1])


def _moved(tensor: torch.Tensor, device: torch.device, is_param: bool) -> Any:
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if is_param else value
