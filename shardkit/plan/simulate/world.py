"""A world of ranks that is not there: fake tensors, a process group that answers at once, engines told to cope."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...launch.ranks.env import RankEnv
from ...parallel.weights import Weights
from ...parallel.world import World
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
    group = dist.group.WORLD
    assert group is not None
    with ExitStack() as stack:
        stack.enter_context(_Fakes(allow_non_fake_inputs=True))
        stack.enter_context(ConstantItems())
        stack.enter_context(patch("shardkit.strategies.ddp.DistributedDataParallel", StandInDDP))
        stack.enter_context(patch("shardkit.strategies.fsdp.init_device_mesh", _real_mesh))
        stack.enter_context(patch.object(nn.Module, "_apply", _apply_to_fakes))
        stack.enter_context(patch.object(GradScaler, "_maybe_opt_step", _step_all_the_same))
        if zero:
            stack.enter_context(_deepspeed_alone())
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers."):
                for key, value in _AS_IN_TRAINING.items():
                    if key in vars(module):
                        stack.enter_context(patch.object(module, key, value))
        stack.enter_context(patch(f"{_FSDP}._fsdp_param._chunk_with_empty", _Chunks))
        for caller in ("_fsdp_init", "_fully_shard"):  # it differs from one version of torch to another
            stack.enter_context(patch(f"{_FSDP}.{caller}._move_states_to_device", _move_fakes, create=True))
        yield World(env, device, group, group)


class _Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Never touches a device, whatever `torch.cuda.is_available` is made to say."""

    avoid_device_init = True


def _real_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
    """A mesh is made of real numbers."""
    with unset_fake_temporarily():
        return init_device_mesh(*args, **kwargs)


# transformers takes fake tensors for a trace that is to be exported, and builds masks that training does not need.
_AS_IN_TRAINING: dict[str, Callable[..., Any]] = {
    "is_tracing": lambda *_, **__: False,
    "is_fake_tensor": lambda *_, **__: False,
    "find_packed_sequence_indices": lambda *_, **__: None,
}

_apply = nn.Module._apply
_FSDP = "torch.distributed.fsdp._fully_shard"


def _apply_to_fakes(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """`Module._apply` that keeps every parameter the object it is: torch does not swap fakes that are referred to."""
    if any(isinstance(param, DTensor) for param in self.parameters()):  # FSDP2 takes over its shards itself
        return _apply(self, fn, recurse)  # type: ignore[no-any-return, no-untyped-call]
    for module in self.modules() if recurse else (self,):
        for param in module._parameters.values():
            if param is not None:
                _set_data(param, fn(param))
                if param.grad is not None:
                    _set_data(param.grad, fn(param.grad))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
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


def _never(looks: str) -> Any:
    """Let a function that looks for infinities find none."""
    function = resolve_name(looks)

    def looked(*args: Any, **kwargs: Any) -> bool:
        function(*args, **kwargs)  # it takes memory
        return False

    return patch(looks, looked)


@contextmanager
def _deepspeed_alone() -> Iterator[None]:
    """DeepSpeed compares what its ranks did; here there is nobody to compare with, and no gradient that overflows."""
    coordinator = "deepspeed.runtime.zero.partitioned_param_coordinator"
    with (
        patch(f"{coordinator}.assert_ints_same_as_other_ranks", lambda ints: None),
        _never("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.has_overflow"),
        _never("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.has_overflow"),
        patch("shardkit.strategies.zero.engine.build_cpu_adam", lambda world: None),
        patch("deepspeed.ops.adam.DeepSpeedCPUAdam", _CPUAdam),
        # offload_ratio and pure_bf16 ask for exactly this type
        patch("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedCPUAdam", _CPUAdam),
        patch("deepspeed.runtime.zero.stage3.DeepSpeedCPUAdam", _CPUAdam),
    ):
        yield


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
                torch._fused_adamw_(
                    [param], [param.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [], lr=0.0, beta1=0.0,
                    beta2=0.0, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False,
                )  # fmt: skip


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
            for held, is_param in ((module._parameters, True), (module._buffers, False)):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _moved(tensor, device, is_param)
                    held[name] = made[id(tensor)][1]


def _moved(tensor: torch.Tensor, device: torch.device, is_param: bool) -> Any:
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if is_param else value
