"""State dicts that torch.save wrote (`.pt`, `.pth`, `.bin`), as a source of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .safetensors import listed_files, weights_source
from .source import FileTensor, Source
from .torch_zip import Archive
from .unpickle import TensorRef

INDEX = "pytorch_model.bin.index.json"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_HOLDERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts put the model's state dict."""


def is_torch_folder(folder: Path) -> bool:
    return (folder / INDEX).exists() or len(_lone(folder)) == 1


def _lone(folder: Path) -> list[Path]:
    return [folder / name for name in ("model.pt", "pytorch_model.bin") if (folder / name).is_file()]


def open_torch(path: Path) -> Source:
    """A file, or a folder with one or with an index, as a source of weights; optimizer state in it is left out.

    Raises:
        CheckpointError: damaged, hostile, or without a state dict.
    """
    lone = _lone(path) if path.is_dir() and not (path / INDEX).exists() else []
    found: dict[str, FileTensor] = {}
    ties: dict[str, str] = {}
    notes: list[str] = []
    for file in lone or listed_files(path, INDEX, ".bin"):
        archive = Archive(file)
        weights, left = _state_dict(archive.content, file)
        notes += [f"left out: {', '.join(left)} of {file.name}"] if left else []
        first: dict[Any, str] = {}
        for name, ref in weights.items():
            place = (ref.storage.key, ref.start, ref.shape, ref.stride)
            if ref.numel and first.setdefault(place, name) != name:
                ties[name] = first[place]
            else:
                found[name] = archive.tensor(ref, name)
    return weights_source("torch", path, found, ties, notes=notes)


def _state_dict(content: Any, file: Path) -> tuple[dict[str, TensorRef], list[str]]:
    """The tensors by name, and the names of what else was saved beside them."""
    if isinstance(content, Mapping):
        for holder in (content, *(content[key] for key in _HOLDERS if isinstance(content.get(key), Mapping))):
            weights = {str(k): v for k, v in holder.items() if isinstance(v, TensorRef)}
            if weights:
                held = [str(k) for k in holder if str(k) not in weights]
                outer = [] if holder is content else [str(k) for k, v in content.items() if v is not holder]
                return weights, held + outer
    raise CheckpointError(
        f"{file} holds no state dict: {type(content).__name__} without tensors by name",
        "save it with torch.save(model.state_dict(), file)",
    )
