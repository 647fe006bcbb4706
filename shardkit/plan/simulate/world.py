"""A pretended world of ranks: fake tensors, a process group that answers at once, and patched engines."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ...launch.ranks.env import RankEnv
from ...memory.state import page_locked
from ...memory.tracing.compat import DEVICE
from ...parallel.init_recipe import CHUNK, InitRecipe
from ...parallel.weights import Later, Weights, parameters_on_meta
from ...parallel.world import World
from .compat import (
    GROUPED_MM,
    LOCAL_SCALAR,
    PIN_MEMORY,
    DispatchMode,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    deepspeed_alone,
    fused_adamw,
    makes_alike,
    no_modes,
    own_apply,
    register_collectives,
    torch_on_fakes,
    transformers_in_training,
)
from .unplannable import constructor_reads, of_deepspeed, refuse_value


@contextmanager
def fake_world(
    device: torch.device, world_size: int, ranks_per_node: int, rank: int = 0, zero: bool = False
) -> Iterator[World]:
    """Pretend to be one of `world_size` ranks; every tensor made inside is fake.

    Args:
        device: the device on which the model would train.
        zero: patch DeepSpeed too.
    """
    local = min(ranks_per_node, world_size)
    env = RankEnv(rank, world_size, rank % local, local, rank // local, -(-world_size // local), "group")
    # Never destroyed: DeepSpeed keeps groups for as long as its process lives.
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise RuntimeError("a process can pretend to be one rank of one world only")
    register_collectives()
    group = dist.group.WORLD
    assert group is not None
    with ExitStack() as stack:
        stack.enter_context(Fakes())
        stack.enter_context(torch_on_fakes(_apply_to_fakes, _Chunks, _move_fakes, _step_all_the_same))
        if zero:
            stack.enter_context(deepspeed_alone(_CPUAdam))
        stack.enter_context(transformers_in_training())
        yield World(env, device, group, group)


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode whose tensors have shapes and devices but no data.

    `.item()` is 1 (False for bool); pinned memory is plain memory of the same size. If an operator gives equal results
    for the same shapes twice, later calls reuse them, also in later worlds: several times as fast as torch's cache.

    Raises:
        ConfigError: the user's code reads a tensor's value; its branches would be taken blindly.
        RuntimeError: an operator got tensors of two dtypes that its kernel on a GPU refuses; torch's fakes do not.
    """

    avoid_device_init = True  # whatever the patched `torch.cuda.is_available` says
    _once: dict[Any, _Results] = {}
    _twice: dict[Any, _Results] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        for memory in (self._once, self._twice):
            if len(memory) > _MOST_KNOWN:
                memory.clear()
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is LOCAL_SCALAR and getattr(args[0], "constant", 0) is None:
            refuse_value(sys._getframe(1))
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.is_pinned.default:
            return args[0].untyped_storage() in self._pinned
        if func is GROUPED_MM and args[0].dtype is not torch.bfloat16:  # torch's own kernel for fakes wants it
            return self._grouped_mm(*args, **(kwargs or {}))
        if _wants_one_dtype(func):
            _refuse_mixed(func, args)
        if func is PIN_MEMORY:
            return self._pin(self._run(torch.ops.aten.clone.default, types, args[:1], {}))
        if kwargs and kwargs.get("pin_memory"):
            return self._pin(self._run(func, types, args, {**kwargs, "pin_memory": False}))
        return self._run(func, types, args, kwargs or {})

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        facts: list[Any] = [func, torch.get_default_dtype()]
        told = makes_alike(func) and self._told_by(args, facts) and self._told_by(kwargs.items(), facts)
        if not told or any(isinstance(value, torch.Tensor) for value in kwargs.values()):  # `out=`
            return super().__torch_dispatch__(func, types, args, kwargs)
        key = tuple(facts)
        try:
            known = self._twice.get(key)
        except TypeError:  # an argument has no hash
            return super().__torch_dispatch__(func, types, args, kwargs)
        if known is not None:
            return self._make(known, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        found = _results(out, args)
        if found is not None and found == self._once.pop(key, None) == _results(self._make(found, args), args):
            self._twice[key] = found
        elif found is not None:
            self._once[key] = found
        return out

    def _told_by(self, args: Any, facts: list[Any]) -> bool:
        """Add to `facts` all that the results depend on; False if that is more than shapes, dtypes and numbers."""
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.constant is not None or arg.fake_mode is not self or arg.layout is not torch.strided:
                    return False
                facts += arg.requires_grad, arg.is_conj(), arg.is_neg(), *_looks(arg)
            elif kind is tuple or kind is list:
                facts += kind, len(arg)
                if not self._told_by(arg, facts):
                    return False
            elif isinstance(arg, (torch.Tensor, torch.ScriptObject)):
                return False
            else:
                facts += kind, arg  # 1 and 1.0 are equal, but make tensors of different dtypes
        return True

    def _make(self, results: _Results, args: Any) -> Any:
        kind, known = results
        made = [self._make_one(*one, args) for one in known]
        return made[0] if kind is None else made if kind is list else tuple(made)

    def _make_one(self, at: int | None, looks: _Looks | None, args: Any) -> Any:
        if looks is None:
            return None if at is None else args[at]
        shape, stride, offset, dtype, device, _ = looks
        if at is None:
            return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
        view = torch.empty(0, dtype=dtype, device="meta")
        return FakeTensor(self, view.set_(args[at].untyped_storage(), offset, shape, stride), device)

    def _grouped_mm(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Matrix products of groups: of rows (2-d × 3-d), of columns (3-d × 2-d), or one each, cut out or given."""
        rows, columns, dtype = left.size(-2), right.size(-1), out_dtype or left.dtype
        pitch = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize if left.is_cuda else columns
        groups: tuple[int, ...] = ()
        if left.dim() == right.dim():
            groups = (left.size(0) if offs is None or left.dim() == 3 else offs.size(0),)
        strides = (*(rows * pitch for _ in groups), pitch, 1)
        made = torch.empty_strided((*groups, rows, columns), strides, dtype=dtype, device="meta")
        return FakeTensor(self, made, left.device)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storage.resize_(page_locked(storage.nbytes()))
        self._pinned.add(storage)
        return tensor


_ONE_DTYPE = {
    "aten::convolution", "aten::mm", "aten::addmm", "aten::mv", "aten::addmv",
    "aten::native_layer_norm", "aten::native_group_norm", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::index_add", "aten::index_add_", "aten::index_copy", "aten::index_copy_",
}  # fmt: skip
"""Operators whose CUDA kernels take floats of one dtype, while their fakes take several. Batched products check it."""


@functools.cache
def _wants_one_dtype(func: Any) -> bool:
    return func.name() in _ONE_DTYPE


def _refuse_mixed(func: Any, args: Any) -> None:
    floats = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    dtypes = list(dict.fromkeys(arg.dtype for arg in floats))
    if len(dtypes) > 1 and any(arg.is_cuda for arg in floats):
        raise RuntimeError(f"{func.name()} expects tensors of the same dtype, but got {dtypes[0]} and {dtypes[1]}")


_MOST_KNOWN = 50_000
"""Most operators (with shapes) that the cache holds; a trace has one to five thousand."""
_Looks = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device, int]
"""Shape, stride, offset, dtype and device of a tensor, and the bytes of its storage."""
_Results = tuple[type | None, tuple[tuple[int | None, _Looks | None], ...]]
"""The type of the sequence of results (`None`: a single one), and each result: a new tensor (None, looks), a view of an
argument (its index, looks), an argument (its index, None), or nothing (None, None)."""


def _looks(tensor: Any) -> _Looks:
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device,
        tensor.untyped_storage().nbytes(),
    )  # fmt: skip


def _results(out: Any, args: Any) -> _Results | None:
    """A description of the results to make them again; `None` if it would not suffice."""
    kind = type(out) if isinstance(out, (tuple, list)) else None
    made = [one for one in (out if kind else (out,)) if one is not None]
    if any(type(one) is not FakeTensor or one.constant is not None or one.layout is not torch.strided for one in made):
        return None
    places = {id(storage): at for at, storage in enumerate(_storages(args))}
    inside = {id(storage) for arg in args if isinstance(arg, (tuple, list)) for storage in _storages(arg)}
    found: list[tuple[int | None, _Looks | None]] = []
    new: list[torch.UntypedStorage] = []
    for one in out if kind else (out,):
        at = None if one is None else next((at for at, arg in enumerate(args) if arg is one), None)
        if one is None or at is not None:
            found.append((at, None))
            continue
        storage = one.untyped_storage()
        if one.requires_grad or one.is_conj() or one.is_neg() or id(storage) in inside:
            return None
        found.append((places.get(id(storage)), _looks(one)))
        if id(storage) not in places:
            new.append(storage)
    return None if len({id(storage) for storage in new}) < len(new) else (kind, tuple(found))


def _storages(args: Any) -> list[torch.UntypedStorage | None]:
    """The storage of each argument; `None` for those that are not tensors."""
    return [arg.untyped_storage() if isinstance(arg, torch.Tensor) else None for arg in args]


def _apply_to_fakes(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """`Module._apply` that keeps every parameter object: torch does not swap fakes that have other references."""
    if any(isinstance(param, DTensor) for param in self.parameters()):  # FSDP2 handles its own shards
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
    """FSDP2's move to the device, for models not built on meta: setting `data` does not change a fake's device."""
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
    """A step that loss scaling never skips: a fake count of infinities reads as 1."""
    return optimizer.step(*args, **kwargs)


class _CPUAdam(torch.optim.Optimizer):
    """DeepSpeedCPUAdam's state, made in the first step as there, with another in-place kernel."""

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


_READS = (
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.equal, torch.allclose, torch.is_nonzero,
)  # fmt: skip


class _ReadValues(TorchFunctionMode):
    """Lets `answer` handle each read of a tensor's value; DeepSpeed's own reads run unchanged."""

    def __init__(self, answer: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not of_deepspeed(sys._getframe(1)):
            return self._answer(partial(func, *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _read_whole() -> AbstractContextManager[Any]:
    """Fake tensors' own `tolist` reads element by element, that of real ones at once."""
    return patch.object(FakeTensor, "tolist", torch.Tensor.tolist)


def _refused(read: Callable[[], Any]) -> Any:
    raise constructor_reads(sys._getframe(1))


class _Chunks:
    """The shards of a parameter, made on demand: of a thousand ranks, only this rank's shard is made."""

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


class _LargeOnMeta(DispatchMode):  # type: ignore[no-untyped-call]
    """`torch.empty` makes large tensors on meta: in training nobody touches their memory before they are parameters."""

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
    others = [*model.buffers(), *(value for value in plain if isinstance(value, torch.Tensor))]
    return make_model() if any(tensor.is_meta for tensor in others) else model


class _Probe(Weights):
    """Finds the large parameters that stay on meta; refuses models that need the values of one."""

    _strict = True

    @property
    def recipes(self) -> dict[str, InitRecipe]:
        return self._recipes


class FakeWeights(Weights):
    """Weights without values.

    A constructor that reads values (rates of layers from a `linspace`) gets the true ones: it is run once more before,
    on real tensors, its parameters on meta, or real where it reads those and training would make them real as well.
    """

    def build(
        self,
        make_model: Callable[[], nn.Module],
        construction: AbstractContextManager[object] | None,
        cut_up: bool = False,
        later: Later | None = None,
    ) -> nn.Module:
        if self.init_parameter is None and later is not None:
            with suppress(Exception), no_modes():  # the trace names an error of the model's own
                probe = _Probe(self.seed)
                probe.build(make_model, None, later="on meta")
                self._recipes = probe.recipes
        if self._recipes or (self.init_parameter is not None and construction is None):
            make_model = partial(_made_untouched, make_model)
        try:
            with _ReadValues(_refused), _read_whole():
                return super().build(make_model, construction, cut_up, later)
        except Exception:  # the exception of a fake read depends on how the value is read
            values = self._really_read(make_model)
            if not values:
                raise
        with _ReadValues(lambda read: values.pop(0) if values else _refused(read)), _read_whole():
            return super().build(make_model, construction, cut_up, later)

    def _really_read(self, make_model: Callable[[], nn.Module]) -> list[Any]:
        """The values that the constructor reads; empty if it fails on real tensors too, or reads nothing."""
        values: list[Any] = []

        def kept(read: Callable[[], Any]) -> Any:
            values.append(read())
            return values[-1]

        def drawn(*_: object) -> None:
            raise AssertionError("nothing is drawn while a model is built")

        for init in (drawn, self.init_parameter):
            values.clear()
            with suppress(Exception):  # that of the fake one is told: it may name an operator, and this is of no run
                with no_modes(), _ReadValues(kept):
                    Weights(self.seed, init).build(make_model, None, later="on meta")
                return values
        return []

    def _constructed(self, make_model: Callable[[], nn.Module], later: Later | None) -> nn.Module:
        with torch.random.fork_rng(devices=[]), parameters_on_meta() if self._recipes else nullcontext():
            torch.manual_seed(self.seed)
            model = make_model()
        if self._recipes:
            named = model.named_parameters()
            self._made = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in named if name not in self._recipes}
        return model

    def fill(self, fqn: str, shape: torch.Size, out: torch.Tensor, start: int = 0) -> None:
        """Make the host memory that drawing takes, and draw nothing."""
        if out.numel() and self._made.pop(fqn, None) is None:
            self._draw(fqn, shape)

    def _draw(self, fqn: str, shape: torch.Size) -> None:
        with no_modes():
            recipe = self.recipe(fqn, shape)
        torch.empty(CHUNK if isinstance(recipe, InitRecipe) else shape.numel(), dtype=torch.float32)

    def materialise(self, model: nn.Module, device: torch.device, world: World | None = None) -> None:
        """Put the model on the device; `Module.to` cannot swap fake parameters that have weak references."""
        made: dict[int, Any] = {}
        for fqn, param in model.named_parameters():
            if (value := self._made.pop(fqn, None)) is not None:  # made by the constructor: on meta in this trace only
                real = nn.Parameter(value.to(param.dtype), requires_grad=param.requires_grad)
                made[id(param)] = param, _moved(real, device, True)
            elif param.is_meta:
                made[id(param)] = param, _moved(param, device, True)
                self._draw(fqn, param.shape)
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
    if tensor.device == device:
        return tensor  # as `Module.to` leaves it
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if is_param else value
