"""Tensors of a proof on disk: each rank's pieces with their places in the full tensors, and what assembles them.

The recorder in the program's processes writes pieces; one process's recorder and the comparer read them. A piece is a
dict that JSON holds: `shape` of the full tensor, `local` shape, `offset` of a DTensor's part (None for a plain tensor),
`dtype`, `at` (the byte in `file`), `hash` and `norm`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Mapping
from typing import Any

import torch


class PieceWriter:
    """Appends tensors to a file one by one, so that no rank holds a second copy of its model."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = open(path, "wb")  # noqa: SIM115 - open for as long as a step takes

    def add(self, tensor: Any) -> dict[str, Any]:
        """Write this rank's part of a tensor. Collective only for a DTensor whose partial sums nobody has added."""
        tensor = tensor.detach()
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        shape, offset = tuple(tensor.shape), None
        if hasattr(tensor, "device_mesh"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            if any(placement.is_partial() for placement in tensor.placements):
                tensor = tensor.full_tensor()
            else:
                _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                tensor = tensor.to_local()
        if hasattr(tensor, "wait"):
            tensor = tensor.wait()
        # A copy: numpy's view of a tensor forbids to resize its storage, as FSDP does.
        local = tensor.to("cpu", copy=True).contiguous()
        content = local.reshape(-1).view(torch.uint8).numpy()
        self.file.write(b"\0" * (-self.file.tell() % 64))
        piece = {
            "shape": shape, "local": tuple(local.shape), "offset": offset,
            "dtype": str(local.dtype).removeprefix("torch."),
            "file": os.path.basename(self.path), "at": self.file.tell(),
            "hash": hashlib.blake2b(content, digest_size=12).hexdigest(),
            "norm": float(torch.linalg.vector_norm(local, dtype=torch.float64)) if local.is_floating_point() else 0.0,
        }  # fmt: skip
        self.file.write(content)
        return piece

    def close(self, index: dict[str, Any]) -> None:
        self.publish(index)
        self.file.close()

    def publish(self, index: dict[str, Any]) -> None:
        """Make what was written readable: the index appears when the tensors are complete."""
        self.file.flush()
        path = os.path.splitext(self.path)[0] + ".json"
        with open(path + ".tmp", "w") as file:
            json.dump(index, file)
        os.replace(path + ".tmp", path)


def read(folder: str, name: str) -> dict[int, dict[str, Any]]:
    """Rank → its record of an event: `start`, `step1` and so on; empty if no rank has one."""
    records = {}
    for entry in os.listdir(folder):
        if match := re.fullmatch(rf"{name}\.rank(\d+)\.json", entry):
            with open(os.path.join(folder, entry)) as file:
                records[int(match[1])] = json.load(file)
    return dict(sorted(records.items()))


_MAPS: dict[str, mmap.mmap] = {}


def tensor_of(folder: str, piece: dict[str, Any]) -> Any:
    """A piece's numbers, mapped from its file."""
    dtype, shape = getattr(torch, piece["dtype"]), tuple(piece["local"])
    count = 1
    for length in shape:
        count *= length
    if not count:
        return torch.zeros(shape, dtype=dtype)
    path = os.path.join(folder, piece["file"])
    if path not in _MAPS:
        with open(path, "rb") as file:
            _MAPS[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(_MAPS[path], dtype=dtype, count=count, offset=piece["at"]).reshape(shape)


def places(pieces: dict[int, dict[str, Any]], shape: tuple[int, ...]) -> dict[int, tuple[int, ...]] | None:
    """Rank → offset of its piece in the full tensor of that shape; None if the pieces do not fill it.

    DTensors know their offsets. Plain tensors of the full shape are copies. Others were split by hand: along the
    dimension in which they add up, in the order of the ranks, with replicas where there are more pieces than parts.
    """
    locals_ = {rank: tuple(piece["local"]) for rank, piece in pieces.items()}
    if any(piece["offset"] is not None for piece in pieces.values()):
        fits = all(tuple(piece["shape"]) == shape for piece in pieces.values())
        return {rank: tuple(piece["offset"] or (0,) * len(shape)) for rank, piece in pieces.items()} if fits else None
    if all(local == shape for local in locals_.values()):
        return {rank: (0,) * len(shape) for rank in pieces}
    local = next(iter(locals_.values()))
    if len(set(locals_.values())) > 1 or len(local) != len(shape):
        return None
    split = [dim for dim in range(len(shape)) if local[dim] != shape[dim]]
    if len(split) != 1 or not local[split[0]] or shape[split[0]] % local[split[0]]:
        return None
    n_parts, ranks = shape[split[0]] // local[split[0]], list(pieces)
    if len(ranks) % n_parts:
        return None

    def layout(part_of: Any) -> dict[int, tuple[int, ...]]:
        return {
            rank: tuple(part_of(index) * local[dim] if dim == split[0] else 0 for dim in range(len(shape)))
            for index, rank in enumerate(ranks)
        }

    layouts = [layout(lambda index: index % n_parts), layout(lambda index: index // (len(ranks) // n_parts))]
    return next((offsets for offsets in layouts if not differing(pieces, offsets)), layouts[0])


def differing(pieces: dict[int, dict[str, Any]], offsets: dict[int, tuple[int, ...]]) -> list[int]:
    """The ranks whose copy of a part is not that of the lowest rank with the same part."""
    hashes: dict[tuple[Any, ...], str] = {}
    return [
        rank
        for rank, piece in pieces.items()
        if hashes.setdefault((offsets[rank], tuple(piece["local"])), piece["hash"]) != piece["hash"]
    ]


def assemble(folder: str, pieces: dict[int, Any], shape: tuple[int, ...]) -> tuple[Any, list[int]]:
    """The full tensor and the ranks whose copies differ; (None, []) if the pieces do not make that shape."""
    present = {rank: piece for rank, piece in pieces.items() if piece is not None}
    if not shape:  # engines that shard hold a number as a tensor of one
        vectors = {
            rank: piece if piece["local"] else {**piece, "shape": (1,), "local": (1,)}
            for rank, piece in present.items()
        }
        vector, ranks = assemble(folder, vectors, (1,))
        return (None if vector is None else vector.reshape(())), ranks
    offsets = places(present, shape) if present else None
    if offsets is None:
        return None, []
    lowest = next(iter(present))
    if tuple(present[lowest]["local"]) == shape:
        return tensor_of(folder, present[lowest]), differing(present, offsets)
    full = torch.zeros(shape, dtype=getattr(torch, present[lowest]["dtype"]))
    for rank in reversed(present):  # the lowest rank's copy of a part stays
        piece = present[rank]
        full[tuple(slice(at, at + size) for at, size in zip(offsets[rank], piece["local"], strict=True))] = tensor_of(
            folder, piece
        )
    return full, differing(present, offsets)


def pack(writer: PieceWriter, argument: Any) -> dict[str, Any]:
    """Nested containers of tensors and plain values as JSON; TypeError for another object."""
    if isinstance(argument, torch.Tensor):
        return {"tensor": writer.add(argument)}
    if isinstance(argument, Mapping):
        return {"dict": {str(key): pack(writer, member) for key, member in argument.items()}}
    if isinstance(argument, list | tuple):
        return {"list": [pack(writer, member) for member in argument], "is_tuple": isinstance(argument, tuple)}
    if argument is None or isinstance(argument, bool | int | float | str):
        return {"plain": argument}
    raise TypeError(f"{type(argument).__name__} is no tensor and no container of tensors")


def digest(packed: dict[str, Any]) -> str:
    """A hash of what was packed."""

    def content(node: dict[str, Any]) -> Any:
        if "tensor" in node:
            return [node["tensor"]["hash"], node["tensor"]["shape"]]
        if "dict" in node:
            return {key: content(member) for key, member in node["dict"].items()}
        return [content(member) for member in node["list"]] if "list" in node else node["plain"]

    return hashlib.blake2b(json.dumps(content(packed)).encode(), digest_size=8).hexdigest()


def unpack(folder: str, batches: list[dict[str, Any]]) -> Any:
    """Several batches as one: tensors with the length of the batch are concatenated, others are to be equal."""
    sizes: list[int] = []

    def measure(node: dict[str, Any]) -> None:
        if "tensor" in node and node["tensor"]["shape"]:
            sizes.append(node["tensor"]["shape"][0])
        for member in (*node.get("dict", {}).values(), *node.get("list", [])):
            measure(member)

    measure(batches[0])
    length = max(set(sizes), key=sizes.count) if sizes else 0

    def join(nodes: list[dict[str, Any]]) -> Any:
        if "tensor" in nodes[0]:
            tensors = [tensor_of(folder, node["tensor"]) for node in nodes]
            if tensors[0].dim() and tensors[0].size(0) == length:
                return torch.cat(tensors)
            if not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
                raise ValueError("tensors of a batch that hold no rows differ between ranks")
            return tensors[0].clone()
        if "dict" in nodes[0]:
            return {key: join([node["dict"][key] for node in nodes]) for key in nodes[0]["dict"]}
        if "list" in nodes[0]:
            members = [join(list(group)) for group in zip(*(node["list"] for node in nodes), strict=True)]
            return tuple(members) if nodes[0]["is_tuple"] else members
        return nodes[0]["plain"]

    return join(batches)


def by_name(records: dict[int, dict[str, Any]], field: str) -> dict[str, dict[int, Any]]:
    """Name → rank → piece of a field of the ranks' records, in the order of the lowest rank."""
    names: dict[str, dict[int, Any]] = {}
    for rank, record in records.items():
        for name, piece in record[field].items():
            names.setdefault(name, {})[rank] = piece
    return names
