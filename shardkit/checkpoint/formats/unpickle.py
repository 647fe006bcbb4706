"""Read the pickles and archives of DCP and DeepSpeed without running them; their own readers run pickles.

Only a fixed list of names is allowed, and none is imported. Tensors become `TensorRef`; their data stays in the file.
Objects of the tools' own classes become `PickledObject`, which is data only. Anything else is refused.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...errors import CheckpointError
from ..native.manifest import whole_numbers
from .tensor_source import RESTORE, Extent, FileTensor, reading

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # PKWARE APPNOTE 4.3.7: signature, then the lengths of name and extra field


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


STAND_INS = {
    **_records("argparse", "Namespace"),
    **_records("pathlib", "PosixPath PurePosixPath WindowsPath PureWindowsPath Path"),
    **_records("pathlib._local", "PosixPath PurePosixPath WindowsPath PureWindowsPath Path"),
    **_records("numpy", "ndarray dtype"),
    **_records("numpy.core.multiarray", "_reconstruct scalar"),
    **_records("numpy._core.multiarray", "_reconstruct scalar"),
    **_records("_codecs", "encode"),
    **_records("datetime", "datetime date timedelta"),
}
"""Classes that training scripts save beside weights → classes that hold their data and do nothing."""
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
    **STAND_INS,
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

    Eighty bytes can stand for 2**40 objects: a hostile pickle can cost memory and time, and nothing else. `file`: the
    file's path, for messages.
    """
    with reading(file):
        try:
            return _Unpickler(io.BytesIO(content)).load()
        except Refused as error:
            raise CheckpointError(
                f"{file} asks for {error}, which no checkpoint needs: it was not loaded",
                "do not trust this file; if it is your own, save plain tensors, numbers, text, lists and dicts",
            ) from error


class _Window(io.RawIOBase):
    """Bytes of a mapped file, as a file."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._content, self._at = content.data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._content[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


class Archive:
    """One `torch.save` archive: a whole file, or a part of one as DCP packs them."""

    def __init__(self, file: Path, content: npt.NDArray[np.uint8]) -> None:
        self.file, self._bytes = file, content
        with reading(file):
            window = io.BufferedReader(_Window(content))
            if not zipfile.is_zipfile(window):
                raise CheckpointError(
                    f"{file} is not the zip archive that torch.save writes",
                    "check the path, or restore it from a copy",
                )
            self._records = self._index(window)
        self.content = load(self._pickle, file)  # the saved object, with a `TensorRef` for each tensor

    def _index(self, window: BinaryIO) -> dict[str, tuple[int, int]]:
        """Read the archive's directory and its pickle; returns the key of each stored array → (offset, bytes)."""
        archive = zipfile.ZipFile(window)
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1 or len(entries) != len(archive.infolist()):
            raise ValueError(f"{len(pickles)} entries data.pkl, or a name twice")
        root, records = pickles[0].removesuffix("data.pkl"), {}
        for name, entry in entries.items():
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise ValueError(f"{name} is compressed")
            window.seek(entry.header_offset)
            signature, name_length, extra_length = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
            offset = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if signature != b"PK\x03\x04" or offset + entry.file_size > len(self._bytes):
                raise ValueError(f"{name} is cut off")
            records[name.removeprefix(f"{root}data/")] = (offset, entry.file_size)
        if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
            raise CheckpointError(f"{self.file} was written by a big-endian machine", "save it on a little-endian one")
        self._pickle = archive.read(pickles[0])
        return records

    def elements(self, ref: TensorRef, name: str, start: int = 0, length: int | None = None) -> npt.NDArray[np.uint8]:
        """The bytes of the tensor's elements [start, start + length); `None` = to its end."""
        if not ref.is_contiguous:
            raise CheckpointError(
                f"{name} in {self.file} is not contiguous: strides {ref.stride} for shape {ref.shape}",
                "save it again as tensor.contiguous()",
            )
        offset, size = self._records.get(ref.storage.key, (0, -1))
        if (ref.start + ref.numel) * ref.dtype.itemsize > size:
            raise CheckpointError(f"{self.file} does not hold all of {name}", RESTORE)
        offset += (ref.start + start) * ref.dtype.itemsize
        return self._bytes[offset : offset + (ref.numel - start if length is None else length) * ref.dtype.itemsize]

    def tensor(self, ref: TensorRef, name: str) -> FileTensor:
        return FileTensor(ref.shape, ref.dtype, (Extent(self.elements(ref, name), (0,), ref.numel),))

    def number(self, content: Any, name: str) -> float:
        """A number of the pickle, which may be stored as a tensor of one element."""
        if isinstance(content, TensorRef) and content.numel == 1:
            content = torch.frombuffer(bytearray(self.elements(content, name)), dtype=content.dtype).item()
        if isinstance(content, bool) or not isinstance(content, (int, float)):
            raise CheckpointError(f"{name} in {self.file} is not a number", RESTORE)
        return int(content) if float(content).is_integer() else float(content)
