"""Read weights that others saved, in safetensors or by torch.save: their own libraries map the files.

Torch files (`.pt`, `.pth`, `.bin`) are read with `weights_only=True`. Headers of safetensors are written here: the
library's writer takes whole tensors, and a conversion holds only a piece of one.

Formats: https://github.com/huggingface/safetensors#format, and the folder's index `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...errors import CheckpointError
from ...files import read_regular
from ..native.reader import TensorSpec
from .tensor_source import FileTensor, Source, canonical, file_source, logical, mapped, reading
from .unpickle import STAND_INS

SAFETENSORS_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")


def open_safetensors(path: Path) -> Source:
    """Open a `.safetensors` file, or a folder of them, as a source of weights."""
    tensors: dict[str, FileTensor] = {}
    for file in listed_files(path, SAFETENSORS_INDEX, ".safetensors"):
        with reading(file), safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in tensors:
                    raise CheckpointError(f"{name} is in {file} and in another file of {path}", "keep one set of files")
                tensors[name] = mapped(opened.get_tensor(name))
    return weights_source("safetensors", path, tensors)


def weights_source(
    kind: str, path: Path, tensors: Mapping[str, FileTensor], ties: Mapping[str, str] | None = None, **fields: Any
) -> Source:
    """A source of weights and buffers, from tensors with the names that another tool gave them. `ties`: further name of
    a tied weight → its name in `tensors`. `fields`: further attributes of the source."""
    ties = ties or {}
    plain = canonical([*tensors, *ties])
    by_logical_name = {logical(plain[name], tensor.dtype): tensor for name, tensor in tensors.items()}
    return file_source(kind, path, by_logical_name, ties={plain[a]: plain[n] for a, n in ties.items()}, **fields)


def listed_files(path: Path, index: str, suffix: str) -> list[Path]:
    """The files that a folder's index names, or all with the suffix if it has none; `path` itself if it is a file."""
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
    """The first bytes of a file that holds the tensors in this order, without gaps: its length and the header."""
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


TORCH_INDEX = "pytorch_model.bin.index.json"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_HOLDERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts put the model's state dict."""


def is_torch_folder(folder: Path) -> bool:
    """Whether a folder has an index of torch files, or one torch file with a usual name."""
    return (folder / TORCH_INDEX).exists() or len(_lone(folder)) == 1


def _lone(folder: Path) -> list[Path]:
    """The torch files with usual names in a folder."""
    return [folder / name for name in ("model.pt", "pytorch_model.bin") if (folder / name).is_file()]


def open_torch(path: Path) -> Source:
    """Open a torch file, or a folder with one or with an index, as a source of weights without optimizer state."""
    lone = _lone(path) if path.is_dir() and not (path / TORCH_INDEX).exists() else []
    tensors: dict[str, FileTensor] = {}
    ties: dict[str, str] = {}
    notes: list[str] = []
    for file in lone or listed_files(path, TORCH_INDEX, ".bin"):
        weights, left_out = _state_dict(_load(file), file)
        notes += [f"left out: {', '.join(left_out)} of {file.name}"] if left_out else []
        first_names: dict[Any, str] = {}
        for name, tensor in weights.items():
            if not tensor.is_contiguous():
                raise CheckpointError(
                    f"{name} in {file} is not contiguous: strides {tensor.stride()} for shape {tuple(tensor.shape)}",
                    "save it again as tensor.contiguous()",
                )
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape)
            if tensor.numel() and first_names.setdefault(place, name) != name:
                ties[name] = first_names[place]
            else:
                tensors[name] = mapped(tensor)
    return weights_source("torch", path, tensors, ties, notes=notes)


def _load(file: Path) -> Any:
    """The saved object, with mapped tensors; objects of other classes have their data alone."""
    with reading(file):
        if not zipfile.is_zipfile(file):
            raise CheckpointError(
                f"{file} is not the zip archive that torch.save writes",
                "check the path, or restore it from a copy; save a file of torch before 1.6 again with torch.save",
            )
        with zipfile.ZipFile(file) as archive:
            # torch would map the compressed bytes as if they were numbers.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
        try:
            with torch.serialization.safe_globals([(kind, name) for name, kind in STAND_INS.items()]):
                return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            global_name = re.search(r"GLOBAL (\S+)", str(error))
            if global_name is None:
                raise
            raise CheckpointError(
                f"{file} asks for {global_name[1]}, which no checkpoint needs: it was not loaded",
                "do not trust this file; if it is your own, save plain tensors, numbers, text, lists and dicts",
            ) from error


def _state_dict(content: Any, file: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors by name of the state dict in a saved object, and the names of everything else in the object."""
    if isinstance(content, Mapping):
        for holder in (content, *(content[key] for key in _HOLDERS if isinstance(content.get(key), Mapping))):
            weights = {str(k): v for k, v in holder.items() if _is_plain(v)}
            if weights:
                skipped = [str(k) for k in holder if str(k) not in weights]
                outer = [] if holder is content else [str(k) for k, v in content.items() if v is not holder]
                return weights, skipped + outer
    raise CheckpointError(
        f"{file} holds no state dict: {type(content).__name__} without tensors by name",
        "save it with torch.save(model.state_dict(), file)",
    )


def _is_plain(value: object) -> bool:
    """Whether a value is a tensor of numbers in memory: neither sparse nor a subclass, such as a DTensor."""
    is_tensor = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_tensor and value.layout == torch.strided and not value.is_meta  # type: ignore[attr-defined]
