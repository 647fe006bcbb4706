"""Read files of torch.save (`.pt`, `.pth`, `.bin`), zip archives of a pickle and arrays, without torch.load."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...errors import CheckpointError
from ...files import open_regular
from .safetensors import listed_files, weights_source
from .tensor_source import RESTORE, Extent, FileTensor, Source, reading
from .unpickle import TensorRef, load

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # PKWARE APPNOTE 4.3.7: signature, then the lengths of name and extra field


class _Window(io.FileIO):
    """Presents the bytes [start, start + length) of an open file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__(file.fileno(), closefd=False)
        self._start, self._length = start, length

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._length}[whence]
        return super().seek(self._start + max(0, base + offset)) - self._start

    def tell(self) -> int:
        return super().tell() - self._start

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[: max(0, self._length - self.tell())])

    read, readall = io.RawIOBase.read, io.RawIOBase.readall  # type: ignore[assignment]  # by `readinto`


class Archive:
    """One `torch.save` archive: a whole file, or a part of one as DCP packs them.

    Attributes:
        content: the saved object, with a `TensorRef` for each tensor; see `unpickle.load`.

    Raises:
        CheckpointError: the file is not such an archive, is damaged, or would run code.
    """

    def __init__(self, file: Path, start: int = 0, length: int | None = None) -> None:
        self.file, self._start = file, start
        with reading(file), open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            self._length = size - start if length is None else length
            if start + self._length > size:
                raise ValueError(f"{size} bytes, {start + self._length} are needed")
            window = io.BufferedReader(_Window(opened, start, self._length))
            if not zipfile.is_zipfile(window):
                raise CheckpointError(
                    f"{file} is not the zip archive that torch.save writes",
                    "check the path, or restore it from a copy; save a file of torch before 1.6 again with torch.save",
                )
            self._records = self._index(window)
        self.content = load(self._pickle, file)

    def _index(self, window: BinaryIO) -> dict[str, tuple[int, int]]:
        """Read the archive's directory and its pickle.

        Returns:
            Key of each stored array → (offset in the file, bytes).

        Raises:
            ValueError: an entry is compressed, cut off, missing, or there twice.
            CheckpointError: the arrays are big-endian.
        """
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
            if signature != b"PK\x03\x04" or offset + entry.file_size > self._length:
                raise ValueError(f"{name} is cut off")
            records[name.removeprefix(f"{root}data/")] = (self._start + offset, entry.file_size)
        if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
            raise CheckpointError(
                f"{self.file} was written by a big-endian machine", "save it again on a little-endian one"
            )
        self._pickle = archive.read(pickles[0])
        return records

    def offset_of(self, ref: TensorRef, name: str) -> int:
        """The offset of the tensor's first element in the file, in bytes.

        Raises:
            CheckpointError: the tensor is missing, incomplete, or not contiguous.
        """
        if not ref.is_contiguous:
            raise CheckpointError(
                f"{name} in {self.file} is not contiguous: strides {ref.stride} for shape {ref.shape}",
                "save it again as tensor.contiguous()",
            )
        offset, size = self._records.get(ref.storage.key, (0, -1))
        if (ref.start + ref.numel) * ref.dtype.itemsize > size:
            raise CheckpointError(f"{self.file} does not hold all of {name}", RESTORE)
        return offset + ref.start * ref.dtype.itemsize

    def tensor(self, ref: TensorRef, name: str) -> FileTensor:
        """A tensor of the pickle with its extent in the file."""
        return FileTensor(ref.shape, ref.dtype, (Extent(self.file, self.offset_of(ref, name), (0,), ref.numel),))

    def number(self, content: Any, name: str) -> float:
        """A number of the pickle, which may be stored as a tensor of one element.

        Raises:
            CheckpointError: the value is no number.
        """
        if isinstance(content, TensorRef) and content.numel == 1:
            with open_regular(self.file) as file:
                file.seek(self.offset_of(content, name))
                raw = bytearray(file.read(content.dtype.itemsize))
            content = torch.frombuffer(raw, dtype=content.dtype).item()
        if isinstance(content, bool) or not isinstance(content, (int, float)):
            raise CheckpointError(f"{name} in {self.file} is not a number", RESTORE)
        return int(content) if float(content).is_integer() else float(content)


INDEX = "pytorch_model.bin.index.json"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_HOLDERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts put the model's state dict."""


def is_torch_folder(folder: Path) -> bool:
    """Whether a folder has an index of torch files, or one torch file with a usual name."""
    return (folder / INDEX).exists() or len(_lone(folder)) == 1


def _lone(folder: Path) -> list[Path]:
    """The torch files with usual names in a folder."""
    return [folder / name for name in ("model.pt", "pytorch_model.bin") if (folder / name).is_file()]


def open_torch(path: Path) -> Source:
    """Open a torch file, or a folder with one or with an index, as a source of weights without optimizer state.

    Raises:
        CheckpointError: a file is damaged, hostile, or without a state dict.
    """
    lone = _lone(path) if path.is_dir() and not (path / INDEX).exists() else []
    tensors: dict[str, FileTensor] = {}
    ties: dict[str, str] = {}
    notes: list[str] = []
    for file in lone or listed_files(path, INDEX, ".bin"):
        archive = Archive(file)
        weights, left_out = _state_dict(archive.content, file)
        notes += [f"left out: {', '.join(left_out)} of {file.name}"] if left_out else []
        first_names: dict[Any, str] = {}
        for name, ref in weights.items():
            location = (ref.storage.key, ref.start, ref.shape, ref.stride)
            if ref.numel and first_names.setdefault(location, name) != name:
                ties[name] = first_names[location]
            else:
                tensors[name] = archive.tensor(ref, name)
    return weights_source("torch", path, tensors, ties, notes=notes)


def _state_dict(content: Any, file: Path) -> tuple[dict[str, TensorRef], list[str]]:
    """Find the state dict in a saved object.

    Returns:
        The tensors by name, and the names of everything else in the object.

    Raises:
        CheckpointError: there is no state dict.
    """
    if isinstance(content, Mapping):
        for holder in (content, *(content[key] for key in _HOLDERS if isinstance(content.get(key), Mapping))):
            weights = {str(k): v for k, v in holder.items() if isinstance(v, TensorRef)}
            if weights:
                skipped = [str(k) for k in holder if str(k) not in weights]
                outer = [] if holder is content else [str(k) for k, v in content.items() if v is not holder]
                return weights, skipped + outer
    raise CheckpointError(
        f"{file} holds no state dict: {type(content).__name__} without tensors by name",
        "save it with torch.save(model.state_dict(), file)",
    )
