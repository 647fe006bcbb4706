"""Write a state dict in the format of torch.save, a piece of a tensor at a time.

`torch.load(file, weights_only=True)` reads the file, also with `mmap=True`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...parallel.compat import rebuild_tensor, storage_types
from ..native.reader import TensorSpec
from ..native.writer import byte_view

ALIGNMENT = 64
"""Arrays begin at multiples of this many bytes, as in torch.save, so that a memory map is aligned."""
_ROOT = "model"
_FIXED_HEADER, _ZIP64_EXTRA = 30, 20
_DATE = (1980, 1, 1, 0, 0, 0)

Pieces = Callable[[str], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class _Storage:
    """Stands for a stored array while the state dict is pickled."""

    key: int
    spec: TensorSpec


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor while the state dict is pickled."""

    storage: _Storage


class _Pickler(pickle.Pickler):
    """Writes the references that torch.save writes in place of storages and tensors."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = storage_types().get(obj.spec.dtype)
        storage = torch.UntypedStorage if kind is None else getattr(torch, kind)
        numel = math.prod(obj.spec.shape)
        count = numel if kind is not None else numel * obj.spec.dtype.itemsize
        return ("storage", storage, str(obj.key), "cpu", count)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Tensor):
            return NotImplemented
        spec = obj.storage.spec
        strides = tuple(math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape)))
        hooks: OrderedDict[str, Any] = OrderedDict()
        common = (obj.storage, 0, tuple(spec.shape), strides, False, hooks)
        if spec.dtype in storage_types():
            return rebuild_tensor(2), common
        return rebuild_tensor(3), (*common, spec.dtype)


def write_state_dict(file: Path, tensors: Mapping[str, TensorSpec], ties: Mapping[str, str], pieces: Pieces) -> None:
    """Write tensors to a new file, each under all of its names.

    Args:
        ties: further name of a tensor → its name in `tensors`; both share their elements when the file is loaded.
        pieces: gives a tensor's elements in order, as 1-D tensors of the type that `tensors` says.
    """
    storages = {name: _Storage(key, spec) for key, (name, spec) in enumerate(tensors.items())}
    state = OrderedDict((name, _Tensor(storage)) for name, storage in storages.items())
    state.update({alias: _Tensor(storages[name]) for alias, name in ties.items()})
    content = io.BytesIO()
    _Pickler(content, protocol=2).dump(state)
    with zipfile.ZipFile(file, "x", allowZip64=True) as archive:
        archive.writestr(_zip_entry("data.pkl"), content.getvalue())
        archive.writestr(_zip_entry("byteorder"), b"little")
        for name, storage in storages.items():
            with archive.open(_aligned(archive, f"data/{storage.key}"), "w", force_zip64=True) as out:
                for piece in pieces(name):
                    out.write(byte_view(piece))
        archive.writestr(_zip_entry("version"), b"3\n")


def _zip_entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=_DATE)


def _aligned(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """An entry whose data begins aligned. An extra field, which readers skip, fills the space before the data."""
    entry = _zip_entry(name)
    at = archive.start_dir + _FIXED_HEADER + len(entry.filename) + _ZIP64_EXTRA + 4
    padding = -at % ALIGNMENT
    entry.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)  # "FB", torch's own id for it
    return entry
