"""Tensors of a proof on disk: each rank's pieces with their places in the full tensors, and what assembles them.

The recorder in the program's processes writes pieces; one process's recorder and the comparer read them. A piece is a
dict that JSON holds: `shape` of the full tensor, `local` shape, `offset` of a DTensor's part or `start` of a fragment
in the flattened tensor (both None for a plain tensor), `dtype`, `at` (the byte in `file`), `hash` and `norm`.

Of a large tensor a piece holds the crossings of a grid of indices, alike in both runs: a smaller tensor, in whose
coordinates are `shape`, `local`, `offset` and `start`. `hash` and `norm` remain those of all numbers, and `of` is the
piece of these, without `at` where they are not kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Fragment(NamedTuple):
    """What a rank holds of a tensor: a range of its flattened numbers, perhaps none."""

    numbers: Any  # a vector
    start: int
    shape: tuple[int, ...]  # of the full tensor


Grid = list[Any]
"""Of each dimension the sampled indices, in order."""
SAMPLED_ABOVE = 2**23
"""Numbers of a tensor above which an eighth of so many are recorded."""


def grid(name: str, shape: tuple[int, ...], n_numbers: int) -> Grid:
    """The indices that are sampled of a parameter, at random by its name and shape: one of each stretch of a dimension,
    so that each rank's part has some. A short dimension keeps more of its length."""
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    )
    remaining, counts = float(n_numbers), [0] * len(shape)
    by_length = sorted(range(len(shape)), key=lambda dim: shape[dim])
    for position, dim in enumerate(by_length):
        counts[dim] = max(1, min(shape[dim], int(remaining ** (1 / (len(shape) - position)))))
        remaining /= counts[dim]
    indices = []
    for length, count in zip(shape, counts, strict=True):
        begins = torch.arange(count + 1) * length // count
        inside = torch.rand(count, generator=generator, dtype=torch.float64)
        indices.append(begins[:-1] + (inside * (begins[1:] - begins[:-1])).long())
    return indices


def grid_like(name: str, shape: tuple[int, ...], pieces: dict[int, Any], n_numbers: int) -> Grid | None:
    """The grid of a full tensor of which ranks have recorded these pieces; None if they have recorded all of it."""
    origins = {rank: piece["of"] for rank, piece in pieces.items() if piece is not None and "of" in piece}
    if not origins:
        return None
    if not any(is_split_by_hand(origin, shape) for origin in origins.values()):
        return grid(name, shape, n_numbers)
    offsets = places(origins, shape)  # each rank has taken its part for a tensor by itself
    if offsets is None:
        return None
    part = grid(name, tuple(next(iter(origins.values()))["local"]), n_numbers)
    return [torch.unique(torch.cat([index + o[dim] for o in offsets.values()])) for dim, index in enumerate(part)]


def crossings(tensor: Any, grid: Grid) -> Any:
    """A full tensor's numbers at the crossings of a grid."""
    for dim, index in enumerate(grid):
        tensor = tensor.index_select(dim, index)
    return tensor


def _sampled(local: Any, piece: dict[str, Any], grid: Grid) -> dict[str, Any]:
    """The sampled numbers of a rank's part, and their place in the sample of the full tensor."""
    shape = tuple(map(len, grid))
    if piece["start"] is not None:
        flat = torch.zeros((), dtype=torch.long)
        for index, length in zip(grid, piece["shape"], strict=True):
            flat = flat[..., None] * length + index
        flat = flat.reshape(-1)
        begins_at, end = torch.searchsorted(
            flat, torch.tensor([piece["start"], piece["start"] + local.numel()])
        ).tolist()
        return {"shape": shape, "start": begins_at, "numbers": local[flat[begins_at:end] - piece["start"]]}
    offset, begins, inside = piece["offset"] or (0,) * len(shape), [], []
    for index, begin, length in zip(grid, offset, piece["local"], strict=True):
        begins_at, end = torch.searchsorted(index, torch.tensor([begin, begin + length])).tolist()
        begins.append(begins_at)
        inside.append(index[begins_at:end] - begin)
    numbers = crossings(local, inside)
    return {"shape": shape, "offset": None if piece["offset"] is None else tuple(begins), "numbers": numbers}


def _bytes(local: Any) -> Any:
    return local.reshape(-1).view(torch.uint8).numpy()


def _norm(local: Any) -> float:
    if not local.is_floating_point():
        return 0.0
    if local.numel() > 2**18:  # part by part, as torch makes a copy in 64 bits
        return math.hypot(*map(_norm, local.reshape(-1).split(2**18)))
    return float(torch.linalg.vector_norm(local, dtype=torch.float64))


class PieceWriter:
    """Appends tensors to a file one by one, so that no rank holds a second copy of its model."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = open(path, "wb")  # noqa: SIM115 - open for as long as a step takes

    def add(self, tensor: Any, grid: Grid | None = None, keeps_all: bool = True, equal: Any = None) -> dict[str, Any]:
        """Write this rank's part of a tensor. Collective only for a DTensor whose partial sums nobody has added.

        `grid`: sample a large tensor, and write all of it only if `keeps_all`. `equal`: a piece of the same parameter,
        which is returned if the tensor has not changed.
        """
        fragment = tensor if isinstance(tensor, Fragment) else None
        tensor = (tensor if fragment is None else fragment.numbers).detach()
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        shape, offset = tuple(tensor.shape) if fragment is None else fragment.shape, None
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
        piece = {
            "shape": shape, "local": tuple(local.shape), "offset": offset,
            "start": None if fragment is None else fragment.start,
            "dtype": str(local.dtype).removeprefix("torch."), "file": os.path.basename(self.path),
            "hash": hashlib.blake2b(_bytes(local), digest_size=12).hexdigest(), "norm": _norm(local),
        }  # fmt: skip
        if equal is not None and (equal["hash"], equal["dtype"]) == (piece["hash"], piece["dtype"]):
            return dict(equal)
        if grid is None:
            return {**piece, "at": self._write(local)}
        sampled = _sampled(local, piece, grid)
        of = {**piece, "at": self._write(local)} if keeps_all else piece
        numbers = sampled.pop("numbers").contiguous()
        return {**piece, **sampled, "local": tuple(numbers.shape), "at": self._write(numbers), "of": of}

    def _write(self, local: Any) -> int:
        self.file.write(b"\0" * (-self.file.tell() % 64))
        at = self.file.tell()
        self.file.write(_bytes(local))
        return at

    def close(self, index: dict[str, Any]) -> None:
        self.publish(index)
        self.file.close()

    def publish(self, index: dict[str, Any]) -> None:
        """Make what was written readable: the index appears when the tensors are complete."""
        self.file.flush()
        path = os.path.splitext(self.path)[0] + ".json"
        with open(path + ".tmp", "w") as file:
            file.write(json.dumps(index))  # in C, which `json.dump` is not
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
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    path = os.path.join(folder, piece["file"])
    if path not in _MAPS:
        with open(path, "rb") as file:
            _MAPS[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(_MAPS[path], dtype=dtype, count=count, offset=piece["at"]).reshape(shape)


def is_split_by_hand(piece: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether a piece is a part of a tensor of that shape, whose place only the program knows."""
    return piece["offset"] is None and piece["start"] is None and tuple(piece["local"]) != shape


def region(tensor: Any, piece: dict[str, Any]) -> Any:
    """The part of a full tensor where a piece lies; None where that is not known."""
    if piece["start"] is not None:
        end = piece["start"] + math.prod(piece["local"])
        return tensor.reshape(-1)[piece["start"] : end].reshape(piece["local"])
    if piece["offset"] is None:
        return None
    return tensor[tuple(slice(at, at + n) for at, n in zip(piece["offset"], piece["local"], strict=True))]


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
        if hashes.setdefault(part_of(piece, offsets[rank]), piece["hash"]) != piece["hash"]
    ]


def part_of(piece: dict[str, Any], offset: tuple[int, ...]) -> tuple[Any, ...]:
    """Which part of the full tensor a piece is: of sampled parts several may be empty at the same offset."""
    of = piece.get("of", piece)
    return (offset, tuple(of["local"]), tuple(of["offset"] or ()), of["start"])


def norm(pieces: dict[int, dict[str, Any]], shape: tuple[int, ...]) -> float:
    """The norm of a full tensor's all numbers, by those of the parts that fill it."""
    offsets = places(pieces, shape)
    if offsets is None or any(piece["start"] is not None for piece in pieces.values()):
        offsets = {rank: (piece["start"] or 0,) for rank, piece in pieces.items()}
    squares = {part_of(piece, offsets[rank]): piece["norm"] ** 2 for rank, piece in pieces.items()}
    return math.sqrt(sum(squares.values()))


def unsampled(pieces: dict[int, Any]) -> dict[int, Any]:
    """The pieces with all numbers, where they are kept."""
    origins = {rank: piece and piece.get("of", piece) for rank, piece in pieces.items()}
    return {rank: piece for rank, piece in origins.items() if piece is None or "at" in piece}


def assemble(folder: str, pieces: dict[int, Any], shape: tuple[int, ...]) -> tuple[Any, list[int]]:
    """The full tensor and the ranks whose copies differ; (None, []) if the pieces do not make that shape."""
    present = {rank: piece for rank, piece in pieces.items() if piece is not None}
    if not shape:  # engines that shard hold a number as a tensor of one
        vectors = {
            rank: {**piece, "shape": (1,), "local": tuple(piece["local"]) or (1,)} for rank, piece in present.items()
        }
        vector, ranks = assemble(folder, vectors, (1,))
        return (None if vector is None else vector.reshape(())), ranks
    if any(piece["start"] is not None for piece in present.values()):
        return _of_fragments(folder, present, shape)
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


def _of_fragments(folder: str, pieces: dict[int, Any], shape: tuple[int, ...]) -> tuple[Any, list[int]]:
    """The full tensor of ranges of its flattened numbers; a rank may hold all of it."""
    starts: dict[int, tuple[int, ...]] = {rank: (piece["start"] or 0,) for rank, piece in pieces.items()}
    end = 0
    for (start,), n in sorted((starts[rank], math.prod(piece["local"])) for rank, piece in pieces.items()):
        if start > end and n:
            return None, []
        end = max(end, start + n)
    if end != math.prod(shape) or any(tuple(piece["shape"]) != shape for piece in pieces.values()):
        return None, []
    dtype = next(piece["dtype"] for piece in pieces.values() if end == 0 or math.prod(piece["local"]))
    full = torch.empty(end, dtype=getattr(torch, dtype))
    for rank in reversed(pieces):  # the lowest rank's copy of a part stays
        numbers = tensor_of(folder, pieces[rank]).reshape(-1)
        full[starts[rank][0] : starts[rank][0] + len(numbers)] = numbers
    return full.reshape(shape), differing(pieces, starts)


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


def are_alike(drawn: Any, fed: Any) -> bool:
    """Whether two batches have the same containers, keys and types of tensors, of any length."""
    if isinstance(drawn, torch.Tensor):
        return isinstance(fed, torch.Tensor) and (drawn.dtype, drawn.dim()) == (fed.dtype, fed.dim())
    if isinstance(drawn, Mapping):
        return (
            isinstance(fed, Mapping)
            and drawn.keys() == fed.keys()
            and all(are_alike(drawn[key], fed[key]) for key in drawn)
        )
    if isinstance(drawn, list | tuple):
        return isinstance(fed, list | tuple) and len(drawn) == len(fed) and all(map(are_alike, drawn, fed))
    return type(drawn) is type(fed)


def by_name(records: dict[int, dict[str, Any]], field: str) -> dict[str, dict[int, Any]]:
    """Name → rank → piece of a field of the ranks' records, in the order of the lowest rank."""
    names: dict[str, dict[int, Any]] = {}
    for rank, record in records.items():
        for name, piece in record[field].items():
            names.setdefault(name, {})[rank] = piece
    return names
