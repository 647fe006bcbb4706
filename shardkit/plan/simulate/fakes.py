"""Fake tensors: shapes, dtypes and devices without data, made again from memory where an operator repeats."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...memory.probe import page_locked
from ...memory.tracing.compat import DEVICE, schema
from .compat import (
    ALL_GATHER,
    GROUPED_MM,
    LOCAL_SCALAR,
    PIN_MEMORY,
    WAIT,
    FakeTensor,
    FakeTensorMode,
    copy_of_fake,
    makes_alike,
)
from .unplannable import refuse_value


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose tensors have shapes and devices, but no data.

    `.item()` returns 1 (False for bool). Pinned memory is plain memory of the same size.

    An operator that returned equal results twice for the same shapes is not run again: later calls, also those of later
    worlds, make the results from a description of them. This is several times as fast as torch's own cache of fakes.
    A view's position in its storage counts only where results depend on it: slices of equal length are equal.
    """

    avoid_device_init = True  # although `torch.cuda.is_available`, which is patched, says that there is a GPU
    _seen_once: dict[Any, _Results] = {}
    _seen_twice: dict[Any, _Results] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        for memory in (self._seen_once, self._seen_twice):
            if len(memory) > _MOST_REMEMBERED:
                memory.clear()
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._handles: dict[Any, Any] = {}
        self._copied: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        traits = _traits(func)
        if traits.is_answered:
            answer = self._answer(func, types, args, kwargs or {})
            if answer is not NotImplemented:
                return answer
        if traits.wants_one_dtype:
            floats = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
            dtypes = list(dict.fromkeys(arg.dtype for arg in floats))
            if len(dtypes) > 1 and any(arg.is_cuda for arg in floats):
                words = f"{func.name()} expects tensors of the same dtype, but got {dtypes[0]} and {dtypes[1]}"
                raise RuntimeError(words)
        if kwargs and kwargs.get("pin_memory"):
            return self._pin(self._run(func, types, args, {**kwargs, "pin_memory": False}))
        return self._run(func, types, args, kwargs or {})

    def _answer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that torch's fakes answer in another way; NotImplemented for some arguments."""
        if func is LOCAL_SCALAR and getattr(args[0], "constant", 0) is None:
            refuse_value(sys._getframe(2))
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _IS_PINNED:
            return args[0].untyped_storage() in self._pinned
        if func is GROUPED_MM and args[0].dtype is not torch.bfloat16:  # torch's own fake kernel refuses other dtypes
            return self._grouped_mm(*args, **kwargs)
        if func is PIN_MEMORY:
            return self._pin(self._run(torch.ops.aten.clone.default, types, args[:1], {}))
        if func is ALL_GATHER:
            return self._gather(types, args, kwargs)
        if func is WAIT:  # torch's fake kernel makes a tensor; the real one returns what it has waited for
            return args[0]
        if func in _FROM_STORAGE:  # both memories, torch's and this one, would keep the storage
            self.cache_enabled, before = False, self.cache_enabled
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.cache_enabled = before
        return NotImplemented

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        traits = _traits(func)
        origin, inputs = _origin(func, args, kwargs) if traits.follows else (0, args)
        facts: list[Any] = [func, torch.get_default_dtype()]
        is_described = traits.makes_alike and self._describe(inputs, facts, traits.is_placed)
        if kwargs and is_described:
            has_tensors = any(isinstance(value, torch.Tensor) for value in kwargs.values())  # `out=`
            is_described = not has_tensors and self._describe(kwargs.items(), facts, traits.is_placed)
        if not is_described:
            return super().__torch_dispatch__(func, types, args, kwargs)
        key = tuple(facts)
        try:
            remembered = self._seen_twice.get(key)
        except TypeError:  # an argument has no hash
            return super().__torch_dispatch__(func, types, args, kwargs)
        if remembered is not None and (not traits.views or _fits(remembered, args, origin)):
            return self._make(remembered, args, origin)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if remembered is None:
            self._remember(key, out, args, origin, traits)
        return out

    def _remember(self, key: Any, out: Any, args: Any, origin: int, traits: _Traits) -> None:
        """Describe an operator's results, for later calls if an earlier call had equal ones."""
        description = _results(out, args, origin)
        if description is None or not _fits(description, args, origin):
            return
        if not traits.views and any(at is not None and looks is not None for at, looks in description[1]):
            return
        earlier = self._seen_once.pop(key, None)
        if description == earlier == _results(self._make(description, args, origin), args, origin):
            self._seen_twice[key] = description
        else:
            self._seen_once[key] = description

    def _gather(self, types: Any, args: Any, kwargs: Any) -> Any:
        """An all-gather into one tensor, which it returns with a handle; all handles of the fake group are alike."""
        output, shard, group, *settings = args
        facts: list[Any] = [dist.ProcessGroup.unbox(group).group_name, *settings, *kwargs.items()]
        if not self._describe((output, shard), facts, False):
            return super().__torch_dispatch__(ALL_GATHER, types, args, kwargs)
        handle = self._handles.get(tuple(facts))
        if handle is not None:
            return output, handle
        answer: Any = super().__torch_dispatch__(ALL_GATHER, types, args, kwargs)
        if answer[0] is output:
            self._handles[tuple(facts)] = answer[1]
        return answer

    def _describe(self, args: Any, facts: list[Any], is_placed: bool) -> bool:
        """Append to `facts` what results depend on, with positions in storages if `is_placed`; False if on more."""
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.constant is not None or arg.fake_mode is not self or arg.layout is not torch.strided:
                    return False
                facts += (
                    arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.shape, arg.stride(), arg.dtype, arg.fake_device
                )  # fmt: skip
                if is_placed:
                    facts += arg.storage_offset(), arg.untyped_storage().nbytes()
            elif kind is tuple or kind is list:
                facts += kind, len(arg)
                if not self._describe(arg, facts, is_placed):
                    return False
            elif isinstance(arg, (torch.Tensor, torch.ScriptObject)):
                return False
            else:
                facts += kind, arg  # 1 and 1.0 are equal, but make tensors of different dtypes
        return True

    def _make(self, results: _Results, args: Any, origin: int) -> Any:
        kind, descriptions = results
        tensors = [self._make_result(*description, args, origin) for description in descriptions]
        return tensors[0] if kind is None else tensors if kind is list else tuple(tensors)

    def _make_result(self, at: int | None, looks: _Looks | None, args: Any, origin: int) -> Any:
        if looks is None:
            return None if at is None else args[at]
        shape, stride, offset, dtype, device, _ = looks
        if at is None:
            return self._fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
        view = torch.empty(0, dtype=dtype, device="meta")
        return self._fake(view.set_(args[at].untyped_storage(), origin + offset, shape, stride), device)

    def _fake(self, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor on a device: a copy of an earlier one, four times as fast as torch's constructor."""
        attributes = self._copied.get(device)
        if attributes is None:
            fake = FakeTensor(self, meta, device)
            self._copied[device] = dict(vars(fake))
            return fake
        return copy_of_fake(meta, device, attributes)

    def _grouped_mm(
        self,
        lhs: torch.Tensor,
        rhs: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The shape of `torch._grouped_mm`: one product for each group of rows (2-d × 3-d) or of columns (3-d × 2-d).

        `offs` holds the ends of the groups that are slices of a tensor; a 3-d tensor holds one matrix for each group.
        """
        rows, columns, dtype = lhs.size(-2), rhs.size(-1), out_dtype or lhs.dtype
        pitch = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize if lhs.is_cuda else columns
        groups: tuple[int, ...] = ()
        if lhs.dim() == rhs.dim():
            groups = (lhs.size(0) if offs is None or lhs.dim() == 3 else offs.size(0),)
        strides = (*(rows * pitch for _ in groups), pitch, 1)
        made = torch.empty_strided((*groups, rows, columns), strides, dtype=dtype, device="meta")
        return FakeTensor(self, made, lhs.device)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storage.resize_(page_locked(storage.nbytes()))
        self._pinned.add(storage)
        return tensor


_MOST_REMEMBERED = 50_000
"""Largest number of operators, each with its shapes, in the cache. A trace has one to five thousand of them."""
_SLICE, _AS_STRIDED = torch.ops.aten.slice.Tensor, torch.ops.aten.as_strided.default
_FOLLOWS = {
    "aten::_unsafe_view", "aten::alias", "aten::as_strided", "aten::detach", "aten::expand", "aten::permute",
    "aten::select.int", "aten::slice.Tensor", "aten::split.Tensor", "aten::split_with_sizes", "aten::squeeze",
    "aten::squeeze.dim", "aten::t", "aten::transpose.int", "aten::unbind.int", "aten::unsqueeze", "aten::view",
    "prims::view_of",
}  # fmt: skip
"""Operators whose results are views of their first argument, and move with it: shapes, strides and numbers decide how
far from it they begin. Others may count from the start of the storage."""


_ONE_DTYPE = {
    "aten::convolution", "aten::mm", "aten::addmm", "aten::mv", "aten::addmv",
    "aten::native_layer_norm", "aten::native_group_norm", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::index_add", "aten::index_add_", "aten::index_copy", "aten::index_copy_",
}  # fmt: skip
"""Operators whose CUDA kernels refuse floats of two dtypes, while their fake kernels accept them.

Batched products are not here: their fake kernels check it too.
"""
_FROM_STORAGE = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)
_IS_PINNED = torch.ops.aten.is_pinned.default
_ANSWERED = (*_FROM_STORAGE, LOCAL_SCALAR, _IS_PINNED, GROUPED_MM, PIN_MEMORY, ALL_GATHER, WAIT)


class _Traits(NamedTuple):
    """What is known about an operator before it runs."""

    is_answered: bool  # `Fakes` answers it by itself, for some arguments
    wants_one_dtype: bool  # its CUDA kernel refuses floats of two dtypes
    makes_alike: bool  # see `makes_alike`
    views: bool  # its results are views of arguments
    follows: bool  # they are at a distance from the first argument that shapes and numbers decide
    is_placed: bool  # its results may depend on where its arguments lie in their storages


@functools.cache
def _traits(func: Any) -> _Traits:
    aliases = [returned.alias_info for returned in schema(func).returns]
    views, follows = any(alias is not None and not alias.is_write for alias in aliases), func.name() in _FOLLOWS
    return _Traits(
        is_answered=func in _ANSWERED,
        wants_one_dtype=func.name() in _ONE_DTYPE,
        makes_alike=makes_alike(func),
        views=views or follows,
        follows=follows,
        is_placed=views and not follows,
    )


def _origin(func: Any, args: Any, kwargs: Any) -> tuple[int, Any]:
    """The element of the storage from which a view's offset counts, and arguments that are equal for equal views."""
    base: Any = args[0] if args else None
    if type(base) is not FakeTensor:
        return 0, args
    offset = int(base.storage_offset())
    if func is _AS_STRIDED and len(args) == 4 and args[3] is not None:
        return args[3], args[:3]
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :]) if func is _SLICE else (0,) * 4
    if func is not _SLICE or kwargs or not -base.dim() <= dim < base.dim():
        return offset, args
    begin, stop, _ = slice(start, end).indices(base.shape[dim])
    stride: int = base.stride()[dim]
    return offset + begin * stride, (base, dim, max(0, stop - begin), step)


_Looks = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device, int]
"""Shape, stride, offset, dtype and device of a tensor, and bytes: of a new tensor's storage; of a view, those from its
origin to its end, and the offset counts from there too."""
_Results = tuple[type | None, tuple[tuple[int | None, _Looks | None], ...]]
"""The type of the sequence of results (`None` for a single result), and a description of each result: (None, looks) for
a new tensor, (index of the argument, looks) for a view of an argument, (index of the argument, None) for the argument
itself, and (None, None) for `None`."""


def _results(out: Any, args: Any, origin: int) -> _Results | None:
    """A description from which `Fakes._make` makes an operator's results again; `None` if they cannot be described."""
    kind = type(out) if isinstance(out, (tuple, list)) else None
    results = out if kind else (out,)
    if not all(tensor is None or _is_plain(tensor) for tensor in results):
        return None
    argument_of_storage = {id(storage): at for at, storage in enumerate(_storages(args))}
    nested_storages = {id(storage) for arg in args if isinstance(arg, (tuple, list)) for storage in _storages(arg)}
    descriptions: list[tuple[int | None, _Looks | None]] = []
    new: list[torch.UntypedStorage] = []
    for tensor in results:
        at = None if tensor is None else next((at for at, arg in enumerate(args) if arg is tensor), None)
        if tensor is None or at is not None:
            descriptions.append((at, None))
            continue
        storage = tensor.untyped_storage()
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or id(storage) in nested_storages:
            return None
        at = argument_of_storage.get(id(storage))
        descriptions.append((at, _looks(tensor, None if at is None else origin)))
        if at is None:
            new.append(storage)
    return None if len({id(storage) for storage in new}) < len(new) else (kind, tuple(descriptions))


def _looks(tensor: Any, origin: int | None) -> _Looks:
    """Describe a new tensor (`origin` is None), or a view whose offset counts from `origin`."""
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if origin is None:
        n_bytes = tensor.untyped_storage().nbytes()
    else:
        offset -= origin
        length = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if tensor.numel() else 0
        n_bytes = (offset + length) * tensor.dtype.itemsize
    return shape, stride, offset, tensor.dtype, tensor.fake_device, n_bytes


def _fits(description: _Results, args: Any, origin: int) -> bool:
    """Whether the storages of the arguments hold the views; torch's fakes decide about others, of freed storages."""
    for at, looks in description[1]:
        if at is not None and looks is not None:
            *_, dtype, _, n_bytes = looks
            if origin * dtype.itemsize + n_bytes > args[at].untyped_storage().nbytes():
                return False
    return True


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is FakeTensor and tensor.constant is None and tensor.layout is torch.strided


def _storages(args: Any) -> list[torch.UntypedStorage | None]:
    """The storage of each argument; `None` for those that are not tensors."""
    return [arg.untyped_storage() if isinstance(arg, torch.Tensor) else None for arg in args]
