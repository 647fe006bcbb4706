"""Weights without values, and a pretended world of ranks: a model is built on fake tensors, a group answers at once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ...config.schema import RunConfig
from ...launch.ranks.env import RankEnv
from ...parallel.draws import CHUNK, InitRecipe
from ...parallel.mesh import split_ranks
from ...parallel.weights import Weights
from ...parallel.world import World
from . import compat
from .compat import DispatchMode, FakeTensor, no_modes
from .fakes import Fakes
from .unplannable import constructor_reads, of_deepspeed

_READS = (
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.equal, torch.allclose, torch.is_nonzero,
)  # fmt: skip


class _ReadValues(TorchFunctionMode):
    """Passes each read of a tensor's value to `answer`, except DeepSpeed's own reads, which run unchanged."""

    def __init__(self, answer: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not of_deepspeed(sys._getframe(1)):
            return self._answer(partial(func, *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _read_whole() -> AbstractContextManager[Any]:
    """Read all elements at once in `tolist`, as real tensors do; fake tensors' own `tolist` reads them one by one."""
    return patch.object(FakeTensor, "tolist", torch.Tensor.tolist)


def _refused(read: Callable[[], Any]) -> Any:
    raise constructor_reads(sys._getframe(1))


class _LargeOnMeta(DispatchMode):  # type: ignore[no-untyped-call]
    """Makes large tensors of `torch.empty` on meta, since a run does not touch their memory while it builds a model."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func is torch.ops.aten.empty.memory_format and on_cpu and math.prod(args[0]) >= CHUNK:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def _made_untouched(make_model: Callable[[], nn.Module]) -> nn.Module:
    with _LargeOnMeta():  # type: ignore[no-untyped-call]
        model = make_model()
    plain = [value for module in model.modules() for value in vars(module).values()]
    tensors = [*model.buffers(), *(value for value in plain if isinstance(value, torch.Tensor))]
    return make_model() if any(tensor.is_meta for tensor in tensors) else model


class FakeWeights(Weights):
    """Weights without values.

    Some constructors read values, such as the drop rates of layers from a `linspace`. Such a constructor first runs on
    real tensors, and its reads are then answered with the values seen there. In that first run the parameters are on
    meta, unless the constructor reads parameters that training would make real too.
    """

    def build(
        self,
        make_model: Callable[[], nn.Module],
        construction: AbstractContextManager[object] | None,
        cut_up: bool = False,
    ) -> nn.Module:
        if self.init_parameter is not None and construction is None:
            make_model = partial(_made_untouched, make_model)
        try:
            with _ReadValues(_refused), _read_whole():
                return super().build(make_model, construction, cut_up)
        except Exception:  # which exception a fake read raises depends on how the value is read
            values = self._really_read(make_model)
            if not values:
                raise
        with _ReadValues(lambda read: values.pop(0) if values else _refused(read)), _read_whole():
            return super().build(make_model, construction, cut_up)

    def _really_read(self, make_model: Callable[[], nn.Module]) -> list[Any]:
        """The values that the constructor reads, in order; empty if it reads none, or fails on real tensors too."""
        values: list[Any] = []

        def record(read: Callable[[], Any]) -> Any:
            values.append(read())
            return values[-1]

        def drawn(*_: object) -> None:
            raise AssertionError("nothing is drawn while a model is built")

        for init in (drawn, self.init_parameter):
            values.clear()
            with suppress(Exception):  # the error of the fake run is shown, which may name an operator
                with no_modes(), _ReadValues(record):
                    Weights(self.seed, init).build(make_model, None)
                return values
        return []

    def fill(
        self, fqn: str, shape: torch.Size, out: torch.Tensor, start: int = 0, run: int = 0, stride: int = 0
    ) -> None:
        """Allocate the host memory that drawing a parameter takes, without drawing."""
        if out.numel():
            self._draw(fqn, shape)

    def _draw(self, fqn: str, shape: torch.Size) -> None:
        with no_modes():
            recipe = self.recipe(fqn, shape)
        torch.empty(CHUNK if isinstance(recipe, InitRecipe) else shape.numel(), dtype=torch.float32)

    def materialise(self, model: nn.Module, device: torch.device, world: World | None = None) -> None:
        """Move the model to the device. `Module.to` cannot swap fake parameters that have weak references."""
        made: dict[int, Any] = {}
        for fqn, param in model.named_parameters():
            if param.is_meta:
                made[id(param)] = param, _moved(param, device, True)
                self._draw(fqn, param.shape)
        for module in model.modules():
            named_tensors = (module.named_parameters(recurse=False, remove_duplicate=False), True), (
                module.named_buffers(recurse=False, remove_duplicate=False), False,
            )  # fmt: skip
            for named, is_param in named_tensors:
                for name, tensor in list(named):
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _moved(tensor, device, is_param)
                    setattr(module, name, made[id(tensor)][1])


def _moved(tensor: torch.Tensor, device: torch.device, is_param: bool) -> Any:
    if tensor.device == device:
        return tensor  # as `Module.to` leaves it
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if is_param else value


# A pretended world of ranks: a process group that answers at once, and libraries that accept fake tensors.


@contextmanager
def fake_world(
    device: torch.device, world_size: int, ranks_per_node: int, rank: int, config: RunConfig
) -> Iterator[World]:
    """Pretend to be one of the `world_size` ranks of a run; every tensor made inside is fake."""
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
        if config.parallel.sharding.stage:
            stack.enter_context(compat.deepspeed_alone(_CPUAdam))
        stack.enter_context(compat.transformers_in_training())
        with compat.unset_fake_temporarily():  # a mesh needs real rank numbers
            context, mesh, experts = split_ranks(config, device.type, env)
        yield _EqualRanks(env, device, group, group, context=context, mesh=mesh, experts=experts)


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
