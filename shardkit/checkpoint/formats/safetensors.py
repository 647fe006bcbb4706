"""Read and write safetensors files: 8 bytes of header length, a JSON header, raw little-endian arrays.

The safetensors library is not used here. Its writer takes whole tensors, and a conversion holds only a piece of one.
Its reader maps the file into memory: converting 500 MB to a torch file took 805 MiB of resident memory and 1.67 s of
CPU time with it, 321 MiB and 1.07 s without (docs/log.md). Headers of hostile files are checked here either way.

Format: https://github.com/huggingface/safetensors#format; the folder's index: `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...files import open_regular, read_regular
from ..native.manifest import whole_numbers
from ..native.reader import TensorSpec
from .tensor_source import Extent, FileTensor, Source, canonical, file_source, logical, reading

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")


def open_safetensors(path: Path) -> Source:
    """Open a `.safetensors` file, or a folder of them, as a source of weights.

    Raises:
        CheckpointError: a file is damaged or missing, or has a dtype that shardkit does not know.
    """
    files = listed_files(path, INDEX, ".safetensors")
    tensors: dict[str, FileTensor] = {}
    for file in files:
        in_file = _read_header(file)
        twice = sorted(set(in_file) & set(tensors))
        if twice:
            raise CheckpointError(f"{twice[0]} is in {file} and in another file of {path}", "keep one set of files")
        tensors |= in_file
    return weights_source("safetensors", path, tensors)


def weights_source(
    kind: str, path: Path, tensors: Mapping[str, FileTensor], ties: Mapping[str, str] | None = None, **fields: Any
) -> Source:
    """A source of weights and buffers, from tensors with the names that another tool gave them.

    Args:
        ties: further name of a tied weight → its name in `tensors`.
        fields: further attributes of the source.
    """
    ties = ties or {}
    plain = canonical([*tensors, *ties])
    by_logical_name = {logical(plain[name], tensor.dtype): tensor for name, tensor in tensors.items()}
    return file_source(kind, path, by_logical_name, ties={plain[a]: plain[n] for a, n in ties.items()}, **fields)


def listed_files(path: Path, index: str, suffix: str) -> list[Path]:
    """The files that a folder's index names, or all files with the suffix if there is no index; or `path`, if it is a
    file.

    Raises:
        CheckpointError: the index is damaged or names a file outside of the folder, or a file is missing.
    """
    if path.is_file():
        return [path]
    if not (path / index).exists():
        return sorted(path.glob(f"*{suffix}"))
    with reading(path / index):
        names = set(json.loads(read_regular(path / index))["weight_map"].values())
        if any(Path(name).name != name for name in names):
            raise ValueError("a file outside of the folder")
    files = [path / name for name in sorted(names)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{missing[0]} is missing, {path / index} names it", "download or copy all files")
    return files


def _read_header(file: Path) -> dict[str, FileTensor]:
    """The tensors of a file by name; the header is read and checked, the arrays are not.

    Raises:
        CheckpointError: the file cannot be read, or its header is damaged.
    """
    with reading(file), open_regular(file) as opened:
        n_bytes = os.fstat(opened.fileno()).st_size
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        start = _LENGTH.size + length
        if start > n_bytes:
            raise ValueError("its header does not end before the file does")
        header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        return {name: _entry(file, name, entry, start, n_bytes) for name, entry in header.items()}


def _entry(file: Path, name: str, entry: Mapping[str, Any], start: int, n_bytes: int) -> FileTensor:
    """A header's entry about one tensor, checked.

    Args:
        start: byte of the file at which the arrays begin.
        n_bytes: bytes of the file.

    Raises:
        CheckpointError: the dtype is unknown.
        Exception: the entry is malformed, or the file ends before the tensor does.
    """
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"{name} in {file} is {entry['dtype']}, which shardkit does not know", f"use one of {', '.join(_DTYPES)}"
        )
    dtype, shape = _DTYPES[entry["dtype"]], whole_numbers(entry["shape"])
    begin, end = whole_numbers(entry["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize or start + end > n_bytes:
        raise ValueError(f"{name} of {list(shape)} cannot lie in bytes {begin} to {end} of {n_bytes - start}")
    return FileTensor(shape, dtype, (Extent(file, start + begin, (0,), math.prod(shape)),))


def header_of(tensors: Iterable[tuple[str, TensorSpec]]) -> bytes:
    """The first bytes of a file that holds the tensors in this order, without gaps: the header's length and the header.

    Raises:
        CheckpointError: the format has no such dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, spec in tensors:
        if spec.dtype not in _NAMES:
            raise CheckpointError(f"{name} is {spec.dtype}, which safetensors does not have", "use --to torch")
        end = begin + math.prod(spec.shape) * spec.dtype.itemsize
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays begin aligned
    return _LENGTH.pack(len(text)) + text
