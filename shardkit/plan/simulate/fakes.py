"""Fake tensors: shapes, dtypes and devices without data, made again from memory where an operator repeats."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch

from ...memory.state import page_locked
from ...memory.tracing.compat import DEVICE
from .compat import GROUPED_MM, LOCAL_SCALAR, PIN_MEMORY, FakeTensor, FakeTensorMode, makes_alike
from .unplannable import refuse_value


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose tensors have shapes and devices, but no data.

    `.item()` returns 1 (False for bool). Pinned memory is plain memory of the same size.

    An operator that returned equal results twice for the same shapes is not run again: later calls, also those of later
    worlds, make the results from a description of them. This is several times as fast as torch's own cache of fakes.

    Raises:
        ConfigError: the user's code reads a tensor's value, on which its branches may depend.
        RuntimeError: an operator got tensors of two dtypes. Its kernel on a GPU refuses them; torch's fakes do not.
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is LOCAL_SCALAR and getattr(args[0], "constant", 0) is None:
            refuse_value(sys._getframe(1))
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.is_pinned.default:
            return args[0].untyped_storage() in self._pinned
        if func is GROUPED_MM and args[0].dtype is not torch.bfloat16:  # torch's own fake kernel refuses other dtypes
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
        is_described = makes_alike(func) and self._describe(args, facts) and self._describe(kwargs.items(), facts)
        if not is_described or any(isinstance(value, torch.Tensor) for value in kwargs.values()):  # `out=`
            return super().__torch_dispatch__(func, types, args, kwargs)
        key = tuple(facts)
        try:
            remembered = self._seen_twice.get(key)
        except TypeError:  # an argument has no hash
            return super().__torch_dispatch__(func, types, args, kwargs)
        if remembered is not None:
            return self._make(remembered, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        description = _results(out, args)
        if description is None:
            return out
        if description == self._seen_once.pop(key, None) == _results(self._make(description, args), args):
            self._seen_twice[key] = description
        else:
            self._seen_once[key] = description
        return out

    def _describe(self, args: Any, facts: list[Any]) -> bool:
        """Append to `facts` everything that an operator's results depend on.

        Returns:
            False if the results depend on more than shapes, dtypes and numbers.
        """
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.constant is not None or arg.fake_mode is not self or arg.layout is not torch.strided:
                    return False
                facts += arg.requires_grad, arg.is_conj(), arg.is_neg(), *_looks(arg)
            elif kind is tuple or kind is list:
                facts += kind, len(arg)
                if not self._describe(arg, facts):
                    return False
            elif isinstance(arg, (torch.Tensor, torch.ScriptObject)):
                return False
            else:
                facts += kind, arg  # 1 and 1.0 are equal, but make tensors of different dtypes
        return True

    def _make(self, results: _Results, args: Any) -> Any:
        kind, descriptions = results
        tensors = [self._make_result(*description, args) for description in descriptions]
        return tensors[0] if kind is None else tensors if kind is list else tuple(tensors)

    def _make_result(self, at: int | None, looks: _Looks | None, args: Any) -> Any:
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
        """The shape of `torch._grouped_mm`: one product for each group of rows (2-d × 3-d) or of columns (3-d × 2-d).

        `offs` holds the ends of the groups that are slices of a tensor; a 3-d tensor holds one matrix for each group.
        """
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
"""Operators whose CUDA kernels refuse floats of two dtypes, while their fake kernels accept them.

Batched products are not here: their fake kernels check it too.
"""


@functools.cache
def _wants_one_dtype(func: Any) -> bool:
    return func.name() in _ONE_DTYPE


def _refuse_mixed(func: Any, args: Any) -> None:
    floats = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    dtypes = list(dict.fromkeys(arg.dtype for arg in floats))
    if len(dtypes) > 1 and any(arg.is_cuda for arg in floats):
        raise RuntimeError(f"{func.name()} expects tensors of the same dtype, but got {dtypes[0]} and {dtypes[1]}")


_MOST_REMEMBERED = 50_000
"""Largest number of operators, each with its shapes, in the cache. A trace has one to five thousand of them."""
_Looks = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device, int]
"""Shape, stride, offset, dtype and device of a tensor, and the bytes of its storage."""
_Results = tuple[type | None, tuple[tuple[int | None, _Looks | None], ...]]
"""The type of the sequence of results (`None` for a single result), and a description of each result: (None, looks) for
a new tensor, (index of the argument, looks) for a view of an argument, (index of the argument, None) for the argument
itself, and (None, None) for `None`."""


def _looks(tensor: Any) -> _Looks:
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device,
        tensor.untyped_storage().nbytes(),
    )  # fmt: skip


def _results(out: Any, args: Any) -> _Results | None:
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
        descriptions.append((argument_of_storage.get(id(storage)), _looks(tensor)))
        if id(storage) not in argument_of_storage:
            new.append(storage)
    return None if len({id(storage) for storage in new}) < len(new) else (kind, tuple(descriptions))


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is FakeTensor and tensor.constant is None and tensor.layout is torch.strided


def _storages(args: Any) -> list[torch.UntypedStorage | None]:
    """The storage of each argument; `None` for those that are not tensors."""
    return [arg.untyped_storage() if isinstance(arg, torch.Tensor) else None for arg in args]
