"""Read files of torch.save (`.pt`, `.pth`, `.bin`) by `torch.load`, with `weights_only=True` and mapped."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from .safetensors import listed_files, weights_source
from .tensor_source import FileTensor, Source, mapped, reading
from .unpickle import STAND_INS

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
    """Find the state dict in a saved object.

    Returns:
        The tensors by name, and the names of everything else in the object.
    """
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
