"""Read safetensors by their library, which maps files, and write their headers.

The library's writer takes whole tensors, and a conversion holds only a piece of one: so headers are written here.

Format: https://github.com/huggingface/safetensors#format; the folder's index: `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...errors import CheckpointError
from ...files import read_regular
from ..native.reader import TensorSpec
from .tensor_source import FileTensor, Source, canonical, file_source, logical, mapped, reading

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
        CheckpointError: a file is damaged or missing.
    """
    tensors: dict[str, FileTensor] = {}
    for file in listed_files(path, INDEX, ".safetensors"):
        with reading(file), safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in tensors:
                    raise CheckpointError(f"{name} is in {file} and in another file of {path}", "keep one set of files")
                tensors[name] = mapped(opened.get_tensor(name))
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
        return sorted(file for file in path.glob(f"*{suffix}") if file.is_file())  # a pipe would be waited for
    with reading(path / index):
        names = set(json.loads(read_regular(path / index))["weight_map"].values())
        if any(Path(name).name != name for name in names):
            raise ValueError("a file outside of the folder")
    files = [path / name for name in sorted(names)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{missing[0]} is missing, {path / index} names it", "download or copy all files")
    return files


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
