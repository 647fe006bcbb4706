"""A pretended world of ranks: a process group that answers at once, and libraries that accept fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from ...launch.ranks.env import RankEnv
from ...parallel.world import World
from . import compat
from .fakes import Fakes


@contextmanager
def fake_world(
    device: torch.device, world_size: int, ranks_per_node: int, rank: int = 0, zero: bool = False
) -> Iterator[World]:
    """Pretend to be one of `world_size` ranks, of DeepSpeed's too if `zero`; every tensor made inside is fake."""
    local = min(ranks_per_node, world_size)
    env = RankEnv(rank, world_size, rank % local, local, rank // local, -(-world_size // local), "group")
    # The group is never destroyed, because DeepSpeed keeps groups for as long as its process lives.
    if not dist.is_initialized():
        dist.init_process_group("fake", store=compat.FakeStore(), rank=rank, world_size=world_size)
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise RuntimeError("a process can pretend to be one rank of one world only")
    compat.register_collectives()
    group = dist.group.WORLD
    assert group is not None
    with ExitStack() as stack:
        stack.enter_context(Fakes())
        stack.enter_context(compat.torch_on_fakes(_apply_to_fakes, _Chunks, _move_fakes, _step_all_the_same))
        if zero:
            stack.enter_context(compat.deepspeed_alone(_CPUAdam))
        stack.enter_context(compat.transformers_in_training())
        yield _EqualRanks(env, device, group, group)


class _EqualRanks(World):
    """A world whose other ranks do as this one does: fake tensors carry no numbers from rank to rank."""

    def begin_sum(self, numbers: list[float]) -> Callable[[], list[float]]:
        return lambda: [self.size * number for number in numbers]

    def gather(self, own_object: object) -> list[object]:
        return [own_object] * self.size


def _apply_to_fakes(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """Replaces `Module._apply`, which swaps parameter objects, but not a fake one that is referenced elsewhere."""
    if any(isinstance(param, DTensor) for param in self.parameters()):  # FSDP2's shards need no replacement
        return compat.own_apply(self, fn, recurse)  # type: ignore[no-any-return]
    for module in self.modules() if recurse else (self,):
        for param in module.parameters(recurse=False):
            _set_data(param, fn(param))
            if param.grad is not None:
                _set_data(param.grad, fn(param.grad))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, fn(buffer))
    return self


def _move_fakes(params: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], device: torch.device) -> None:
    """Replaces FSDP2's move of a model to its device: setting `data` does not change a fake tensor's device."""
    for tensor in (*params, *buffers):
        if tensor.device != device and not tensor.is_meta:
            _set_data(tensor, tensor.to(device))


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if value is not tensor:
        with torch.no_grad():
            tensor.data = value.detach()
        if isinstance(tensor, compat.FakeTensor) and isinstance(value, compat.FakeTensor):
            tensor.fake_device = value.fake_device


def _step_all_the_same(self: GradScaler, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the step of `GradScaler`, which would skip the update: a fake count of infinities reads as 1."""
    return optimizer.step(*args, **kwargs)


class _CPUAdam(torch.optim.Optimizer):
    """Replaces DeepSpeedCPUAdam: allocates the same state in the first step, and calls a kernel that has a fake."""

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
                    state |= {key: torch.zeros_like(param, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
                compat.fused_adamw(param, param.grad, state["exp_avg"], state["exp_avg_sq"])


class _Chunks:
    """A parameter's shards, each made when it is read: a plan for a thousand ranks makes this rank's shard alone."""

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
