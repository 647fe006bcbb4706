"""Plan which ranges of flattened tensors a rank writes, and check what a run would load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...errors import CheckpointError
from ...strategies.base import Shard
from .manifest import CHUNK_BYTES, DTYPE_BYTES, TensorEntry, find_hole


@dataclass(frozen=True)
class SavePlan:
    """The part of a save that one rank does.

    Attributes:
        tensors: shape and dtype of each tensor of which the rank holds a part.
        chunks: (tensor, first element, number of elements) of each chunk that it writes, in the order of its file.
        n_bytes: of all its chunks.
    """

    tensors: dict[str, tuple[tuple[int, ...], str]]
    chunks: list[tuple[str, int, int]]
    n_bytes: int


def plan_save(shards: Sequence[Shard], chunk_bytes: int = CHUNK_BYTES) -> tuple[SavePlan, list[torch.Tensor]]:
    """Cut the ranges that this rank writes into chunks. Of ranks with the same range, replica 0 writes it.

    Returns:
        The plan, and the elements of each chunk.
    """
    chunks, contents = [], []
    for shard in shards:
        if shard.replica == 0:
            step = max(1, chunk_bytes // shard.local.element_size())
            for start in range(0, shard.local.numel(), step):
                content = shard.local[start : start + step]
                chunks.append((shard.name, shard.start + start, content.numel()))
                contents.append(content)
    tensors = {shard.name: (tuple(shard.shape), dtype_name(shard.local.dtype)) for shard in shards}
    return SavePlan(tensors, chunks, sum(content.nbytes for content in contents)), contents


def check_plans(plans: Iterable[SavePlan]) -> None:
    """Check that the ranks' plans cover every element.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its ranges leave a hole.
    """
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    ranges: dict[str, list[tuple[int, int]]] = {}
    for plan in plans:
        for name, (shape, dtype) in plan.tensors.items():
            first_shape, first_dtype = tensors.setdefault(name, (shape, dtype))
            if shape != first_shape:
                raise CheckpointError(f"ranks disagree about the shape of {name}: {first_shape} and {shape}")
            if dtype != first_dtype:
                raise CheckpointError(f"ranks disagree about the dtype of {name}")
        for name, start, length in plan.chunks:
            ranges.setdefault(name, []).append((start, length))
    for name, (shape, _) in tensors.items():
        hole = find_hole(math.prod(shape), sorted(ranges.get(name, [])))
        if hole is not None:
            raise CheckpointError(f"element {hole} of {name} is held by no rank, or by two")


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a dtype.

    Raises:
        CheckpointError: the manifest has no name for it (complex, quantised).
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"tensors of {dtype} cannot be saved", f"use one of {', '.join(DTYPE_BYTES)}")
    return name


def matching_entry(tensors: Mapping[str, TensorEntry], shard: Shard) -> TensorEntry:
    """The saved tensor from which a range is filled.

    Raises:
        CheckpointError: it is missing, or has another shape or dtype. Nothing is ever cast or reshaped.
    """
    entry = tensors.get(shard.name)
    if entry is None:
        raise CheckpointError(f"the checkpoint has no {shard.name}", _fix(shard.name))
    if entry.shape != tuple(shard.shape):
        raise CheckpointError(
            f"{shard.name} is {list(entry.shape)} in the checkpoint, {list(shard.shape)} in this run",
            "resume with the same model sizes",
        )
    if entry.dtype != dtype_name(shard.local.dtype):
        raise CheckpointError(
            f"{shard.name} is {entry.dtype} in the checkpoint, {dtype_name(shard.local.dtype)} in this run",
            "resume with the precision it was saved with: types are never cast silently",
        )
    return entry


def refuse_leftovers(tensors: Mapping[str, TensorEntry], run_names: Sequence[str]) -> None:
    """Refuse a checkpoint with a weight, moment or buffer that this run would drop.

    Args:
        run_names: the tensors that the run loads.

    Raises:
        CheckpointError: a tensor would be dropped; the message names it.
    """
    dropped = sorted({n for n, t in tensors.items() if n.startswith(_KINDS) and t.numel} - set(run_names))
    if dropped:
        others_counted = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
        raise CheckpointError(
            f"the checkpoint holds {dropped[0]}{others_counted}, which this run has no place for", _fix(dropped[0])
        )


_KINDS = ("model.", "optim.", "buffer.", "ema.")


def _fix(name: str) -> str:
    """The fix to print if a run and a checkpoint do not hold the same kinds of state."""
    if name.startswith("optim."):
        return "set optim.name and its keys to those of the checkpoint"
    if name.startswith("ema."):
        return "set train.ema_decay if the checkpoint has a moving average, leave it out if not"
    return "resume with the same model"
