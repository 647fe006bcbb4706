"""Plan which rank writes and reads which ranges of flattened tensors, as planners of torch.distributed.checkpoint."""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ...errors import CheckpointError
from ...strategies.base import Shard
from .manifest import CHUNK_BYTES, DTYPE_BYTES, Manifest, TensorEntry, find_hole

Ranges = dict[str, list[Shard]]
"""The local ranges of each logical tensor: the state dict of a save or a load."""


def by_name(shards: Iterable[Shard]) -> Ranges:
    """Group shards by tensor; empty shards are left out."""
    ranges: Ranges = {}
    for shard in shards:
        if shard.local.numel():
            ranges.setdefault(shard.name, []).append(shard)
    return ranges


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a dtype.

    Raises:
        CheckpointError: the manifest has no name for it (complex, quantised).
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"tensors of {dtype} cannot be saved", f"use one of {', '.join(DTYPE_BYTES)}")
    return name


class RangeSavePlanner(SavePlanner):
    """Plans a save: each rank writes its ranges, cut into chunks. Of ranks with the same range, replica 0 writes it."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._ranges: Ranges = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._ranges = state_dict

    def create_local_plan(self) -> SavePlan:
        items = [
            self._item(shard, start, end)
            for shards in self._ranges.values()
            for shard in shards
            if shard.replica == 0
            for start, end in self._cuts(shard)
        ]
        return SavePlan(items, planner_data={name: shards[0].shape for name, shards in self._ranges.items()})

    def _cuts(self, shard: Shard) -> Iterator[tuple[int, int]]:
        step = max(1, self._chunk_bytes // shard.local.element_size())
        for start in range(0, shard.local.numel(), step):
            yield start, min(start + step, shard.local.numel())

    def _item(self, shard: Shard, start: int, end: int) -> WriteItem:
        dtype_name(shard.local.dtype)
        offset = torch.Size([shard.start + start])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offset, torch.Size([end - start])),
            properties=TensorProperties(dtype=shard.local.dtype),
            size=torch.Size([math.prod(shard.shape)]),
        )
        return WriteItem(MetadataIndex(shard.name, offset), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check on the coordinator that the ranks' plans cover every element, and merge their metadata.

        Raises:
            CheckpointError: ranks disagree about a tensor, or its ranges leave a hole.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for plan in all_plans:
            for name, shape in (plan.planner_data or {}).items():
                if shapes.setdefault(name, shape) != shape:
                    raise CheckpointError(f"ranks disagree about the shape of {name}: {shapes[name]} and {shape}")
        stored: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                entry = stored.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, chunks=[]))
                if entry.properties.dtype != data.properties.dtype:
                    raise CheckpointError(f"ranks disagree about the dtype of {item.index.fqn}")
                entry.chunks.append(data.chunk)
        for name, shape in shapes.items():
            chunks = stored[name].chunks if name in stored else []
            chunks.sort(key=lambda chunk: chunk.offsets[0])
            hole = find_hole(math.prod(shape), [(c.offsets[0], c.sizes[0]) for c in chunks])
            if hole is not None:
                raise CheckpointError(f"element {hole} of {name} is held by no rank, or by two")
        return all_plans, Metadata(state_dict_metadata=dict(stored), planner_data=shapes)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = write_item.tensor_data
        assert data is not None
        start, length = data.chunk.offsets[0], data.chunk.sizes[0]
        for shard in self._ranges[write_item.index.fqn]:
            at = start - shard.start
            if at >= 0 and at + length <= shard.local.numel():
                return shard.local[at : at + length]
        raise KeyError(write_item.index)


class RangeLoadPlanner(LoadPlanner):
    """Plans a load: each rank reads the parts of saved chunks that overlap the ranges that it fills."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._ranges: Ranges = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._ranges = state_dict

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads.

        Raises:
            CheckpointError: the checkpoint lacks a tensor that the model needs, or has it with another shape or dtype.
        """
        return LoadPlan(
            [item for name, shards in self._ranges.items() for i, s in enumerate(shards) for item in self._reads(s, i)]
        )

    def _reads(self, shard: Shard, index: int) -> Iterator[ReadItem]:
        entry = matching_entry(self._manifest.tensors, shard)
        start, end = shard.start, shard.start + shard.local.numel()
        starts = [chunk.start for chunk in entry.chunks]
        for at in range(bisect_right(starts, start) - 1, len(entry.chunks)):
            chunk = entry.chunks[at]
            low, high = max(start, chunk.start), min(end, chunk.start + chunk.length)
            if low >= high:
                break
            yield ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(shard.name, torch.Size([shard.start]), index),
                dest_offsets=torch.Size([low - start]),
                storage_index=MetadataIndex(shard.name, torch.Size([chunk.start]), at),
                storage_offsets=torch.Size([low - chunk.start]),
                lengths=torch.Size([high - low]),
            )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("only tensors are saved")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index.index
        assert index is not None
        local = self._ranges[read_item.dest_index.fqn][index].local
        return local.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: `resolve_tensor` gave a view of the destination."""


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
