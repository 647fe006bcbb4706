"""Read folders of torch.distributed.checkpoint: `.metadata` is a pickle, `*.distcp` are packed torch.save archives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...errors import CheckpointError
from ...files import read_regular
from ..native.manifest import whole_numbers
from .hub_names import Region
from .tensor_source import (
    PIECE_BYTES,
    RESTORE,
    Extent,
    FileTensor,
    Source,
    canonical,
    file_source,
    logical,
    map_file,
    reading,
)
from .unpickle import Archive, PickledObject, TensorRef, load

METADATA = ".metadata"
_NAME_IT = "save the model under 'model' and its optimizer under 'optim', as get_state_dict names them"


def open_dcp(folder: Path, weights_only: bool = False) -> Source:
    """Open a folder that `torch.distributed.checkpoint.save` wrote."""
    file = folder / METADATA
    with reading(file):
        return _Folder(folder, load(read_regular(file), file)).source(weights_only)


class _Folder:
    """A folder's tensors, by the keys of its metadata."""

    def __init__(self, path: Path, metadata: PickledObject) -> None:
        self.path = path
        self._files: dict[Path, npt.NDArray[np.uint8]] = {}
        paths: Mapping[str, Any] = metadata.get("planner_data") or {}
        self._entries: dict[str, PickledObject] = {
            key: entry
            for key, entry in metadata.get("state_dict_metadata").items()
            if entry.kind.endswith(".TensorStorageMetadata")
        }
        self._keys = {key: _path(paths.get(key, (key,))) for key in self._entries}
        self._stored = {
            (index.get("fqn"), whole_numbers(index.state.get("offset") or ())): storage
            for index, storage in metadata.get("storage_data").items()
        }

    def source(self, weights_only: bool) -> Source:
        """The model's tensors, and its optimizer's unless `weights_only`, under shardkit's names."""
        states = {key: state for key, path in self._keys.items() if (state := _state(path))}
        prefix, notes = self._model_prefix({fqn for fqn, _ in states.values()}, states)
        weights = {key: str(path[-1]) for key, path in self._keys.items() if path[:-1] == prefix and key not in states}
        plain = canonical(weights.values())
        tensors: dict[str, FileTensor] = {}
        names: dict[str, str] = {}
        for key, fqn in weights.items():
            tensor = self._tensor(key)
            names[fqn] = logical(plain[fqn], tensor.dtype)
            tensors[names[fqn]] = tensor
        scalars: dict[str, float] = {}
        for key, (fqn, kind) in {} if weights_only else states.items():
            if fqn not in plain:
                raise CheckpointError(
                    f"{self.path} holds optimizer state of {fqn!r}, which is not the name of a weight in it",
                    "pass --weights-only, or save it with get_state_dict, which names states by parameter",
                )
            name, tensor = f"optim.{plain[fqn]}.{kind}", self._tensor(key)
            if not tensor.shape:
                archive = self._archive(key, ())
                scalars[name] = archive.number(archive.content, name)
            elif tensor.shape != tensors[logical(plain[fqn], torch.float32)].shape:
                raise CheckpointError(f"{name} in {self.path} is not one value per element", "pass --weights-only")
            else:
                tensors[name] = tensor
        step = max((int(v) for name, v in scalars.items() if name.endswith(".step")), default=0)
        source = file_source("dcp", self.path, tensors, scalars=scalars, step=step, notes=notes)
        return _without_copies(source, {plain[fqn] for fqn, _ in states.values() if fqn in plain})

    def _model_prefix(self, trained: set[str], states: Mapping[str, object]) -> tuple[tuple[str | int, ...], list[str]]:
        """Find the branch of the saved state that holds the model, and note the branches that are left out. It is the
        one whose names are the optimizer's parameters, else the one that is called model, else the only one."""
        branches: dict[tuple[str | int, ...], set[str]] = {}
        for key, path in self._keys.items():
            if key not in states:
                branches.setdefault(path[:-1], set()).add(str(path[-1]))
        fitting = [prefix for prefix, names in branches.items() if trained and trained <= names]
        named = [prefix for prefix in branches if prefix and prefix[-1] in ("model", "module", "state_dict")]
        for choice in (fitting, named, list(branches)):
            if len(choice) == 1:
                left_out = [_text(p) for p in branches if p != choice[0]]
                return choice[0], [f"left out: tensors under {', '.join(left_out)}"] if left_out else []
        if not branches:
            raise CheckpointError(f"{self.path} holds no tensor of a model", _NAME_IT)
        raise CheckpointError(
            f"{self.path} holds several groups of tensors, none of them called model: "
            f"{', '.join(_text(p) for p in branches)}",
            _NAME_IT,
        )

    def _tensor(self, key: str) -> FileTensor:
        """A tensor with the extents of its chunks, each in an archive of its own."""
        entry = self._entries[key]
        shape, state = whole_numbers(entry.get("size")), entry.get("properties").state
        dtype = state["dtype"] if isinstance(state, dict) else state[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype {type(dtype).__name__}")
        extents = []
        for chunk in entry.get("chunks"):
            offsets, sizes = whole_numbers(chunk.get("offsets")), whole_numbers(chunk.get("sizes"))
            archive = self._archive(key, offsets)
            ref = archive.content
            if not isinstance(ref, TensorRef) or ref.dtype != dtype or ref.numel != math.prod(sizes):
                raise CheckpointError(f"{archive.file} does not hold what {METADATA} says of {key}", RESTORE)
            content = archive.elements(ref, key)  # checks that all of it is there: there are no more runs than bytes
            extents.append(Extent(content, *_runs(shape, offsets, sizes)))
        return FileTensor(shape, dtype, tuple(extents))

    def _archive(self, key: str, offsets: tuple[int, ...]) -> Archive:
        """The archive with the chunk of tensor `key` that begins at `offsets`."""
        storage = self._stored[key, offsets]
        name = storage.get("relative_path")
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError("a file of another folder")
        if storage.state.get("transform_descriptors"):
            raise CheckpointError(f"{self.path / name} is compressed", "save it without stream extensions")
        file, (start, length) = self.path / name, whole_numbers([storage.get("offset"), storage.get("length")])
        with reading(file):
            if file not in self._files:
                self._files[file] = map_file(file)
            content = self._files[file][start : start + length]
            if len(content) < length:
                raise ValueError(f"{len(self._files[file])} bytes, {start + length} are needed")
        return Archive(file, content)


def _path(parts: Any) -> tuple[str | int, ...]:
    """Check a tensor's path in the saved state."""
    if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str | int) for part in parts):
        raise ValueError("a path that is not a tuple of names")
    return parts


def _state(path: tuple[str | int, ...]) -> tuple[str, str] | None:
    """(fqn, key) of an optimizer's path (…, state, fqn, key), or flattened (…, "state.fqn.key"); else None."""
    if len(path) >= 3 and path[-3] == "state":
        return str(path[-2]), str(path[-1])
    flat_name = str(path[-1])
    if flat_name.startswith("state.") and flat_name.count(".") >= 2:
        fqn, _, key = flat_name.removeprefix("state.").rpartition(".")
        return fqn, key
    return None


def _runs(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[npt.NDArray[np.int64] | tuple[int, ...], int]:
    """The index of each run's first element in the flattened tensor, for a block of it; and the runs' length."""
    if len(offsets) != len(shape) or any(o < 0 or o + n > s for o, n, s in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"a block of {sizes} at {offsets} in a tensor of {shape}")
    if not math.prod(sizes):
        return (), 0
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return Region("", sizes, tuple(strides), first).runs()


def _without_copies(source: Source, trained: set[str]) -> Source:
    """Drop tied weights that DCP saved again under a second name, which has no moments, and note them as ties."""
    ties: dict[str, str] = {}
    for name, spec in source.tensors.items():
        fqn = name.removeprefix("model.")
        if not name.startswith("model.") or fqn in trained:
            continue
        of_trained = ((f, source.tensors.get(f"model.{f}")) for f in sorted(trained))
        candidates = (f for f, t in of_trained if t is not None and (t.shape, t.dtype) == (spec.shape, spec.dtype))
        original = next((f for f in candidates if _equal(source, name, f"model.{f}")), None)
        if original is not None:
            ties[fqn] = original
    unique = {name: spec for name, spec in source.tensors.items() if name.removeprefix("model.") not in ties}
    return replace(source, tensors=unique, ties=ties)


def _equal(source: Source, name: str, original: str) -> bool:
    """Whether two tensors of the same shape and type have the same elements; False if they are empty."""
    spec = source.tensors[name]
    numel, step = math.prod(spec.shape), PIECE_BYTES // spec.dtype.itemsize
    for start in range(0, numel, step):
        length = min(step, numel - start)
        if not torch.equal(source.read(name, start, length), source.read(original, start, length)):
            return False
    return numel > 0


def _text(prefix: tuple[str | int, ...]) -> str:
    return ".".join(map(str, prefix)) or "the top level"
