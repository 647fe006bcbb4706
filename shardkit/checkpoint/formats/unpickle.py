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
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError
from ..native.manifest import whole_numbers
from .tensor_source import reading


class Refused(Exception):
    """Raised when a pickle asks for a name or an object that is not allowed."""


class StorageRef(NamedTuple):
    """A reference to a stored array: its key in the archive, its dtype, and its number of elements."""

    key: str
    dtype: torch.dtype | None
    numel: int


class TensorRef(NamedTuple):
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


class _Storage(NamedTuple):
    """Stands for one of torch's storage classes."""

    dtype: torch.dtype | None


class _Call(NamedTuple):
    """A function that a pickle may call. A pickle can change a function's attributes, but not a tuple."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class PickledObject:
    """An object whose class is not loaded. It has only the data from which the pickle would make it."""

    kind = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> PickledObject:
        self = super().__new__(cls)
        self.args, self.state = args, kwargs
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """An attribute of the object; raises `KeyError` if it has none of that name."""
        return self.state[name]


def _tensor(storage: Any, start: Any, shape: Any, stride: Any, *options: Any) -> TensorRef:
    """What torch's `_rebuild_tensor` would make; from its third version on, the dtype is one of the options."""
    dtype = next((option for option in options if isinstance(option, torch.dtype)), getattr(storage, "dtype", None))
    if not isinstance(storage, StorageRef) or dtype is None or len(shape) != len(stride):
        raise Refused("a malformed tensor")
    return TensorRef(storage, whole_numbers([start])[0], whole_numbers(shape), whole_numbers(stride), dtype)


def _records(module: str, names: str) -> dict[str, type[PickledObject]]:
    """Classes that stand for those of a module, by their full names."""
    return {f"{module}.{name}": type(name, (PickledObject,), {"kind": f"{module}.{name}"}) for name in names.split()}


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_NAMES: dict[str, Any] = {
    **{f"torch._utils._rebuild_tensor{version}": _Call(_tensor) for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_parameter": _Call(lambda data, *unused: data),
    "torch._utils._rebuild_parameter_with_state": _Call(lambda data, *unused: data),
    "torch._tensor._rebuild_from_type_v2": _Call(lambda function, kind, args, state: function(*args)),
    "torch.serialization._get_layout": _Call(lambda name: name),
    "torch.Size": tuple,
    "torch.storage.UntypedStorage": _Storage(None),
    **{f"torch.{name}": _Storage(dtype) for name, dtype in _STORAGES.items()},
    **{
        f"torch.{name}": kind for name, kind in vars(torch).items() if type(kind) is torch.dtype and not kind.is_complex
    },
    **{f"builtins.{kind.__name__}": kind for kind in (set, frozenset, dict, list, tuple, int, float, complex, slice)},
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _Call(lambda *args: {}),
    **_records("torch", "Tensor device"),
    **_records("torch.nn.parameter", "Parameter Buffer"),
    **_records("torch.distributed.checkpoint.metadata", "Metadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"),
    **_records("torch.distributed.checkpoint.metadata", "TensorStorageMetadata ChunkStorageMetadata TensorProperties"),
    **_records("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    **_records("torch.distributed.checkpoint.filesystem", "_StorageInfo _StoragePrefix"),
    **_records("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler"),
    **_records("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    **_records("deepspeed.utils.tensor_fragment", "fragment_address"),
    **_records("argparse", "Namespace"),
    **_records("pathlib", "PosixPath PurePosixPath WindowsPath PureWindowsPath Path"),
    **_records("pathlib._local", "PosixPath PurePosixPath WindowsPath PureWindowsPath Path"),
    **_records("numpy", "ndarray dtype"),
    **_records("numpy.core.multiarray", "_reconstruct scalar"),
    **_records("numpy._core.multiarray", "_reconstruct scalar"),
    **_records("_codecs", "encode"),
    **_records("datetime", "datetime date timedelta"),
}
"""All that a pickle can name. It can change none of it: state for a class, a tuple or a dtype raises an error."""


class _Unpickler(pickle.Unpickler):
    """Takes every name from the table above."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES:
            raise Refused(f"{module}.{name}")
        return _NAMES[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> StorageRef:
        label, storage, key, _, numel = pid
        if label != "storage" or not isinstance(storage, _Storage) or type(key) is not str or type(numel) is not int:
            raise Refused("a malformed storage")
        return StorageRef(key, storage.dtype, numel)


def load(content: bytes, file: Path) -> Any:
    """Read a pickle's content as dicts, lists, numbers, text, `TensorRef` and `PickledObject`. None of its code runs.

    Eighty bytes can stand for 2**40 objects: a hostile pickle can cost memory and time, and nothing else.

    Args:
        file: the file's path, for messages.

    Raises:
        CheckpointError: the file asks for anything else, or is damaged.
    """
    with reading(file):
        try:
            return _Unpickler(io.BytesIO(content)).load()
        except Refused as error:
            raise CheckpointError(
                f"{file} asks for {error}, which no checkpoint needs: it was not loaded",
                "do not trust this file; if it is your own, save plain tensors, numbers, text, lists and dicts",
            ) from error
