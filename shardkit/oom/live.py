"""Find the tensors that hold the memory, by a walk over all objects: slow, so only after a failure."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from ..memory.rows import KINDS, StateKind
from ..memory.state import local_tensors
from .cap import Made


class NamedShard(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def local(self) -> torch.Tensor: ...


@dataclass
class Live:
    """One storage that is alive."""

    n_bytes: int  # bytes of the whole storage, even if a tensor views only a part
    shape: tuple[int, ...] | None = None  # of the largest tensor on it; `None` for most of what autograd keeps
    dtype: str | None = None
    category: StateKind | None = None  # of the ledger's kinds of state; `None` for activations and the rest
    name: str | None = None  # `model.<fqn>`, `optim.<fqn>.<state>`, `buffer.<fqn>`: the first in a flat buffer
    made: str | None = None  # operator and line; known under a memory cap, or while the allocator keeps its history

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"bytes": fields.pop("n_bytes"), **fields}


def biggest(
    count: int,
    device: torch.device,
    state: Iterable[tuple[StateKind, torch.Tensor]] = (),  # (kind, tensor) pairs, as a strategy yields them
    shards: Iterable[NamedShard] = (),  # they give state its names
    made: Iterable[Made] = (),  # storages that a memory cap recorded
    # address → (bytes, where it was made) of the CUDA allocator's blocks in use, from `snapshot_blocks`
    blocks: Mapping[int, tuple[int, str | None]] | None = None,
) -> list[Live]:
    storages: dict[int, Live] = {}
    # By type: `isinstance` would call proxies, which may do anything.
    for tensor in (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)):
        for local in _plain(tensor, device):
            storage = local.untyped_storage()
            live = storages.setdefault(storage.data_ptr(), Live(storage.nbytes()))
            if live.shape is None or local.numel() > torch.Size(live.shape).numel():
                live.shape, live.dtype = tuple(local.shape), str(local.dtype)
    for note in made:
        live = storages.setdefault(note.address, Live(note.n_bytes, note.shape, note.dtype))
        live.made = note.by
    for address, (n_bytes, frames) in (blocks or {}).items():
        live = storages.setdefault(address, Live(n_bytes))
        live.made = live.made or frames
    order = {kind: index for index, kind in enumerate(KINDS)}
    for kind, tensor in state:
        for local in _plain(tensor, device):
            live = storages.setdefault(local.untyped_storage().data_ptr(), Live(local.untyped_storage().nbytes()))
            if live.category is None or order[kind] < order[live.category]:
                live.category = kind
    for shard in shards:
        for local in _plain(shard.local, device):
            owner = storages.get(local.untyped_storage().data_ptr())
            if owner is not None and owner.name is None:
                owner.name = shard.name
    return sorted(storages.values(), key=lambda live: -live.n_bytes)[:count]


def snapshot_blocks(snapshot: Mapping[str, Any] | None, index: int | None) -> dict[int, tuple[int, str | None]]:
    """Address → (bytes, line of Python that allocated it, if history was kept) of one device's blocks in use."""
    blocks: dict[int, tuple[int, str | None]] = {}
    for segment in (snapshot or {}).get("segments", ()):
        if index is not None and segment["device"] != index:
            continue
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                frames = [frame for frame in block.get("frames") or () if frame["filename"].endswith(".py")]
                users = (frame for frame in frames if "/torch/" not in frame["filename"])
                line = next((f"{frame['filename']}:{frame['line']} in {frame['name']}" for frame in users), None)
                blocks[block["address"]] = (block["size"], line)
    return blocks


def _plain(tensor: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """The strided tensors with real memory on the device; fake tensors claim to be there, but have none."""
    for local in local_tensors(tensor):
        local_device = local.device
        if local_device.type != device.type or (device.index is not None and local_device.index != device.index):
            continue
        if local.layout == torch.strided:
            storage = local.untyped_storage()
            if storage.device.type != "meta" and storage.nbytes():
                yield local
