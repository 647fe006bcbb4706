"""Compare the files that ranks saved with the weights in their memory, and with those that one process saves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor  # so that torch loads DTensors from files of weights alone

from ..errors import listed
from .compare import Ranks
from .inject import shardkit_pieces as pieces
from .verdict import ALLOWED

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
State = dict[str, torch.Tensor]
WRAPPERS = re.compile(
    r"(^|\.)(module|model|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|state_dict)(?=\.)"
)
OF_OPTIMIZER = re.compile(r"optim|exp_avg|momentum_buffer|(^|\.)state\.\d+\.")


@dataclass(frozen=True)
class Finding:
    """What a saved file holds of the trained weights."""

    path: str
    n_equal: int
    wrong: tuple[tuple[str, str], ...]  # name and words, of tensors that are not those in memory
    is_foreign: bool = False  # no tensor is that in memory: an average of the weights, or another step's
    unsure: tuple[str, ...] = ()  # names whose numbers differ, and need not be equal


def findings(folder: Path, memory: Mapping[str, torch.Tensor], trained: set[str]) -> tuple[list[Finding], list[str]]:
    """What the files below a run's overlay hold of the weights in memory, and words on files that cannot be read."""
    found_files, unread = [], []
    by_key = {_plain(name): name for name in memory}
    groups: dict[str, list[tuple[str, State]]] = {}  # files that differ in numbers alone: the ranks', perhaps
    for path, load in _files(folder):
        try:
            tensors = {by_key[_plain(key)]: tensor for key, tensor in load().items() if _plain(key) in by_key}
        except Exception as error:  # any reader's errors: the file is the program's
            unread.append(f"{path} cannot be read: {type(error).__name__}")
            continue
        if tensors.keys() & trained:
            groups.setdefault(re.sub(r"\d+", "#", path), []).append((path, tensors))
    files: list[tuple[str, State]] = []
    for members in groups.values():
        united = _united(members, memory, trained)
        if united is None:
            unread.append(f"{members[0][0]} and its like hold parts of tensors, whose places are not known")
        files += united or []
    for path, tensors in files:
        wrong, n_equal, n_shapes = [], 0, 0
        for name, tensor in tensors.items():
            expected = memory[name]
            if tuple(tensor.shape) != tuple(expected.shape):
                n_shapes += 1
                wrong.append((name, f"saved as {tuple(tensor.shape)}, in memory {tuple(expected.shape)}"))
            elif torch.equal(tensor, expected.to(tensor.dtype)):
                n_equal += 1
            else:
                n_zero = int(((tensor == 0) & (expected.to(tensor.dtype) != 0)).sum())
                change = f"{n_zero} of {tensor.numel()} numbers are zero" if n_zero > 1 else "other numbers"
                wrong.append((name, f"saved with {change}"))
        is_foreign = not n_equal and not n_shapes and all(words.endswith("other numbers") for _, words in wrong)
        wrong += [(name, "not in the file") for name in sorted(trained - tensors.keys())]
        found_files.append(Finding(path, n_equal, tuple(wrong), is_foreign))
    return found_files, unread


def _united(
    members: list[tuple[str, State]], memory: Mapping[str, torch.Tensor], trained: set[str]
) -> list[tuple[str, State]] | None:
    """Files of single ranks as one, those of a whole model by themselves; None if parts cannot be put together."""
    if len(members) == 1 or all(
        trained <= tensors.keys() and all(tensors[name].shape == memory[name].shape for name in trained)
        for _, tensors in members
    ):
        return members
    members = sorted(members, key=lambda member: [int(number) for number in re.findall(r"\d+", member[0])])
    state: State = {}
    for name in dict.fromkeys(chain.from_iterable(tensors for _, tensors in members)):
        copies = [tensors[name] for _, tensors in members if name in tensors]
        expected = memory[name].to(copies[0].dtype)
        full = [copy for copy in copies if copy.shape == expected.shape]
        if len(full) == len(copies):
            state[name] = next((copy for copy in copies if not torch.equal(copy, expected)), expected)
        elif _fit_together(copies, expected):
            state[name] = expected
        else:
            return None
    return [(f"{members[0][0]} with {len(members) - 1} more", state)]


def _fit_together(parts: list[torch.Tensor], full: torch.Tensor) -> bool:
    """Whether parts in the order of the ranks, perhaps with replicas, are a full tensor."""
    distinct = [part for i, part in enumerate(parts) if not any(torch.equal(part, before) for before in parts[:i])]
    for sequence in (parts, distinct):
        if torch.equal(torch.cat([part.reshape(-1) for part in sequence]), full.reshape(-1)):
            return True
        for dim in range(1, full.dim()):
            shapes = {(part.dim(), part.shape[:dim] + part.shape[dim + 1 :]) for part in sequence}
            if len(shapes) == 1 and sequence[0].dim() == full.dim() and torch.equal(torch.cat(sequence, dim), full):
                return True
    return False


def compare(
    ranks: Path, process: Path, is_weight: Callable[[str], bool], foreign: Collection[str]
) -> tuple[list[Finding], list[str]]:
    """What the files below the ranks' overlay hold of those that one process has saved under the same paths.

    `is_weight`: whether a name's numbers are to be equal. `foreign`: paths whose numbers are not.
    """
    files, notes, ends = dict(_files(ranks)), [], []
    parts = _parts(files)
    for path, load in _files(process):
        try:
            expected = _numbers(load())
            tensors = _numbers(files[path]()) if path in files else None
        except Exception as error:  # any reader's errors: the files are the programs'
            notes.append(f"{path} cannot be read: {type(error).__name__}")
            continue
        if not expected:
            continue
        if tensors is None:
            notes.append(f"one process saves {path}, and the ranks do not")
            continue
        if path in parts:
            continue
        wrong, unsure, n_equal = [], [], 0
        for name, tensor in expected.items():
            if name not in tensors:
                is_tied = any(torch.equal(tensor, twin) for key, twin in expected.items() if key in tensors)
                wrong += [] if is_tied else [(name, "not in the file, where one process has it")]
            elif tensors[name].shape != tensor.shape:
                words = f"saved as {tuple(tensors[name].shape)}, by one process as {tuple(tensor.shape)}"
                wrong.append((name, words))
            elif _is_rounding(tensors[name], tensor):
                n_equal += 1
            elif not is_weight(name) or path in foreign:
                unsure.append(name)
            else:
                wrong.append((name, "saved with other numbers than by one process of the same weights"))
        if len(surplus := tensors.keys() - expected.keys()):
            notes.append(f"only the ranks save {listed(sorted(surplus))} in {path}")
        ends.append(Finding(path, n_equal, tuple(wrong), unsure=tuple(unsure)))
    return ends, notes


def _parts(paths: Iterable[str]) -> set[str]:
    """The torch files that are one of several, which differ by a number: each may hold what one rank has."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        if path.endswith(ENDINGS[1:]):
            by_name.setdefault(re.sub(r"\d+", "", path), []).append(path)
    return {path for several in by_name.values() if len(several) > 1 for path in several}


def _numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A file's floating-point tensors by plain name, without those of an optimizer."""
    return {
        _plain(key): tensor
        for key, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.dim() and not OF_OPTIMIZER.search(key)
    }


def _is_rounding(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    eps = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, expected.dtype))
    distance = torch.linalg.vector_norm(tensor.double() - expected.double())
    return bool(distance <= ALLOWED * eps * torch.linalg.vector_norm(expected.double()))


def _plain(key: str) -> str:
    """A name without wrappers and without the adapter's name, which peft leaves out of its files."""
    return WRAPPERS.sub("", "." + key.replace(".default", "")).lstrip(".")


def _files(folder: Path) -> Iterator[tuple[str, Any]]:
    """The program's path of each saved model, and a function that reads its tensors."""
    overlays = json.loads((folder / "overlays.json").read_text())["overlays"]
    for number, lower in enumerate(overlays):
        upper = folder / "upper" / str(number)
        for parent, _, names in os.walk(upper):
            original = os.path.normpath(os.path.join(lower, Path(parent).relative_to(upper)))
            if ".metadata" in names:
                yield original, lambda parent=parent: _distributed(parent)
            shards = sorted(os.path.join(parent, name) for name in names if name.endswith(".safetensors"))
            if shards:
                yield original, lambda shards=shards: _safetensors(shards)
            for name in sorted(names):
                if name.endswith(ENDINGS[1:]) and not name.startswith(("optimizer", "scheduler", "rng_state")):
                    path = os.path.join(parent, name)
                    yield (
                        os.path.join(original, name),
                        lambda path=path: _nested(torch.load(path, map_location="cpu", weights_only=True)),
                    )


def _safetensors(paths: list[str]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: tensor for path in paths for key, tensor in load_file(path).items()}


def _distributed(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(about.size) for key, about in metadata.items() if hasattr(about, "size")}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return {key: tensor for key, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _nested(content: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts; those of an optimizer, whose keys are numbers, have no name."""
    tensors: dict[str, torch.Tensor] = {}
    for key, member in content.items() if isinstance(content, Mapping) else ():
        if isinstance(member, torch.Tensor):
            # A rank that gathers nothing saves its part, as a DTensor.
            tensors[f"{prefix}{key}"] = member.to_local() if hasattr(member, "to_local") else member
        elif isinstance(member, Mapping) and "optim" not in str(key):
            tensors |= _nested(member, f"{prefix}{key}.")
    return tensors


def in_memory(folder: Path, records: Sequence[Ranks]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Name → full weight, and the trained names; of the records the later ones count."""
    tensors: dict[str, torch.Tensor] = {}
    trained: set[str] = set()
    for record in records:
        field = "after" if "after" in next(iter(record.values())) else "weights"
        for name, by_rank in pieces.by_name(dict(record), field).items():
            with_all = pieces.unsampled(by_rank)
            shape = tuple(next(iter(with_all.values()))["shape"])
            tensor = pieces.assemble(str(folder), with_all, shape)[0]
            if tensor is not None:
                tensors[name] = tensor
                trained |= {name} if any(piece["trains"] for piece in by_rank.values()) else set()
    return tensors, trained
