"""Read other tools' pickles without running them: only a fixed list of names is allowed, and none is imported.

Tensors become `TensorRef`; their data stays in the file. Objects of the tools' own classes become `PickledObject`,
which is data only. Anything else that a pickle asks for is refused.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError
from .tensor_source import RESTORE, whole_numbers


class Refused(Exception):
    """Raised when a pickle asks for a name or an object that is not allowed."""


class _Sealed:
    """Base of objects whose state a pickle cannot set."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise Refused(f"state for a {type(self).__name__.lstrip('_')}")


@dataclass(frozen=True)
class StorageRef(_Sealed):
    """A reference to a stored array: its key in the archive, its dtype, and its number of elements."""

    key: str
    dtype: torch.dtype | None
    numel: int


@dataclass(frozen=True)
class TensorRef(_Sealed):
    """A reference to a tensor whose elements lie in `storage`, from element `start` on."""

    storage: StorageRef
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


@dataclass(frozen=True)
class _Storage(_Sealed):
    """Stands for one of torch's storage classes, by name."""

    name: str


class PickledObject:
    """An object whose class is not loaded. It has only the data from which the pickle would make it."""

    kind = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> PickledObject:
        self = super().__new__(cls)
        self.args, self.state, self.items = args, kwargs, []
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def get(self, name: str) -> Any:
        """An attribute of the object; raises `KeyError` if it has none of that name."""
        return self.state[name]


class _Call(_Sealed):
    """Wraps a function that a pickle may call, so that the pickle cannot change the function."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _rebuild(storage: Any, start: Any, shape: Any, stride: Any, *unused: Any) -> TensorRef:
    return _tensor(storage, start, shape, stride, getattr(storage, "dtype", None))


def _rebuild_v3(storage: Any, start: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any) -> TensorRef:
    return _tensor(storage, start, shape, stride, dtype)


def _tensor(storage: Any, start: Any, shape: Any, stride: Any, dtype: Any) -> TensorRef:
    try:
        (offset,), sizes, strides = whole_numbers([start]), whole_numbers(shape), whole_numbers(stride)
    except ValueError as error:
        raise Refused(f"a tensor of {error}") from error
    if not isinstance(storage, StorageRef) or not isinstance(dtype, torch.dtype) or len(sizes) != len(strides):
        raise Refused("a malformed tensor")
    return TensorRef(storage, offset, sizes, strides, dtype)


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if not isinstance(function, _Call):
        raise Refused("a call of something that is not a function")
    return function(*args)


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_DTYPES = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype) and not value.is_complex
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, dict, list, tuple, int, float, complex, slice)},
}
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): lambda data, *unused: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *unused: data,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("torch", "Size"): lambda sizes: tuple(sizes),
    ("collections", "defaultdict"): lambda *args: {},
}
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    "torch": ("Tensor", "device"),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    f"{_DCP}.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "argparse": ("Namespace",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "_codecs": ("encode",),
    "datetime": ("datetime", "date", "timedelta"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Resolves every name from the tables above.

    Each pickle gets classes and wrappers of its own, so that it cannot affect the pickles that are read later.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._records: dict[str, type[PickledObject]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _FUNCTIONS:
            return _Call(_FUNCTIONS[module, name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("torch", "torch.storage") and (name in _STORAGES or name == "UntypedStorage"):
            return _Storage(name)
        if name in _RECORDS.get(module, ()):
            kind = f"{module}.{name}"
            if kind not in self._records:
                self._records[kind] = type(name, (PickledObject,), {"kind": kind})
            return self._records[kind]
        raise Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> StorageRef:
        label, storage, key, _, numel = pid
        if label != "storage" or not isinstance(storage, _Storage) or type(key) is not str or type(numel) is not int:
            raise Refused("a malformed storage")
        return StorageRef(key, _STORAGES.get(storage.name), numel)


def load(content: bytes, file: str) -> Any:
    """Read a pickle's content as dicts, lists, numbers, text, `TensorRef` and `PickledObject`. None of its code runs.

    Eighty bytes can stand for 2**40 objects, so the caller must bound memory and time: see `files.bounded`.

    Args:
        file: the file's name, for messages.

    Raises:
        CheckpointError: the file asks for anything else, or is damaged.
    """
    try:
        return _Unpickler(content).load()
    except Refused as error:
        raise CheckpointError(
            f"{file} asks for {error}, which no checkpoint needs: it was not loaded",
            "do not trust this file; if it is your own, save plain tensors, numbers, text, lists and dicts",
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make the unpickler raise whatever the next opcode trips over
        raise CheckpointError(f"{file} is damaged: {type(error).__name__} while reading it", RESTORE) from error
