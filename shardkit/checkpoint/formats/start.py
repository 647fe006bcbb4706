"""Start a run from existing weights: `model.init_from`.

Each rank reads the ranges that it keeps, a bucket at a time. Ranks of a node that keep the same ranges each read a part
of a bucket and exchange the parts, so a node requests every byte of the source once.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...errors import CheckpointError
from ...parallel.world import World
from ...strategies import Strategy
from ...strategies.base import Shard
from ..native.reader import TensorInfo
from ..native.writer import byte_view
from ..resume import agreed
from .detect import open_source
from .hub_names import as_the_model_names, reference_of
from .tensor_source import PIECE_BYTES, Source

_LOG = logging.getLogger(__name__)
_FIX = "set model.init_from to weights of this model, with its sizes"
_NAMED = 3
"""Names in a message; the rest is a number."""
_BUFFER_BYTES = PIECE_BYTES // 4
"""Bytes of a bucket. All that a rank holds beyond its shard fits into one piece: the bucket, the files' headers, the
description of the model, and the exchange of weights between ranks."""
_MESSAGE_BYTES = 2**18
"""A bucket has one reader for so many of its bytes, at most: many ranks do not make many messages."""
_SAMPLED = 64
"""Values of each tensor by which nodes compare their sources."""
_ALIGNMENT = 16
"""Bytes; a multiple of every element's size."""

Range = tuple[str, int, int]
"""Name in the source, first element, number of elements."""


@dataclass(frozen=True)
class Loaded:
    """A source that a model was filled from.

    Attributes:
        bytes_read: bytes that all ranks together requested from its files; 0 for a checkpoint of shardkit.
        resized: parameter with new rows → its rows in the source, and in the model.
    """

    path: Path
    bytes_read: int
    resized: dict[str, tuple[int, int]]


@dataclass
class _Wanted:
    """A range of the source, and the places in this rank's memory that take it (a weight and its moving average)."""

    info: TensorInfo
    targets: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Piece:
    """A part of a range in a bucket: its first element in the range, its elements, and its first byte in the bucket."""

    place: Range
    first: int
    numel: int
    offset: int


@dataclass
class _Added:
    """Rows that the source lacks: its number of rows and the model's, and this rank's (first element, memory)."""

    rows: tuple[int, int]
    targets: list[tuple[int, torch.Tensor]] = field(default_factory=list)


def load_weights(
    strategy: Strategy,
    world: World,
    group: dist.ProcessGroup,
    path: str | Path,
    name_there: Callable[[str], str | None] = str,
    resized: Collection[str] = (),
) -> Loaded:
    """Fill the wrapped model with the weights at `path`; collective.

    Args:
        group: a gloo group of all ranks, to share errors and pieces.
        path: anything that `shardkit convert` reads; its optimizer state is ignored.
        name_there: a parameter's name in files of the model; `None` for one that they do not hold (an adapter's), which
            keeps its value.
        resized: names of parameters that may have fewer rows there. The new rows become the mean of those, which one
            rank reads once more and sums in float64 in the rows' order: the same bits on any number of ranks.

    Raises:
        CheckpointError: on every rank: a weight is missing or has another shape, the source cannot be trusted, or nodes
            have other weights under this path.
    """
    problem: CheckpointError | None = None
    wanted: dict[Range, _Wanted] = {}
    added: dict[str, _Added] = {}
    with ExitStack() as at_end:
        try:
            source = _opened(Path(path), strategy.model)
            at_end.callback(source.close)
            wanted, added = _wanted(strategy, source, name_there, resized)
            sample = _sample(source, strategy.model) if world.env.n_nodes > 1 and world.env.local_rank == 0 else ""
        except CheckpointError as error:
            problem = CheckpointError(error.cause, error.fix or _FIX)
        agreed(group, problem)
        asked: list[tuple[int, list[Range], dict[str, tuple[int, int]], str]] = [(0, [], {}, "")] * world.size
        rows = {name: part.rows for name, part in added.items()}
        dist.all_gather_object(asked, (world.env.node_rank, list(wanted), rows, sample), group=group)
        _refuse_others({node: there for node, _, _, there in asked if there}, source.path)
        nodes = [(node, ranges) for node, ranges, _, _ in asked]
        rows = dict(sorted(item for _, _, there, _ in asked for item in there.items()))
        if world.is_main:
            _say_left(source, {name for _, ranges in nodes for name, _, _ in ranges})
        agreed(group, _read(source, wanted, nodes, world, group))
        agreed(group, _add_rows(source, added, rows, world, group))
        strategy.weights_changed(replicas_equal=len({node for node, _ in nodes}) == 1)
        found = {name.partition(".")[2]: sizes for name, sizes in rows.items()}
        return Loaded(source.path, int(world.sum([float(source.bytes_read())])[0]), found)


def _opened(path: Path, model: nn.Module) -> Source:
    source = open_source(path.expanduser(), weights_only=True)
    for module in model.modules():
        if hasattr(module, "config") and (reference := reference_of(module)) is not None:
            return as_the_model_names(source, reference)
    return source


def _sample(source: Source, model: nn.Module) -> str:
    """A digest of the model's own config, and of all names, shapes and a few values of each tensor in the source."""
    found = hashlib.blake2b(digest_size=16)
    configs: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    described = next((config for config in configs if hasattr(config, "to_json_string")), None)
    found.update(b"" if described is None else described.to_json_string().encode())
    for name, info in sorted(source.tensors.items()):
        found.update(repr((name, info.shape, info.dtype)).encode())
        middle = math.prod(info.shape) // 2
        for values in source.range_of(name, middle, min(_SAMPLED, math.prod(info.shape) - middle)):
            found.update(byte_view(values))
    return found.hexdigest()


def _refuse_others(samples: Mapping[int, str], path: Path) -> None:
    """Raise if nodes found other weights under one path: each reads its own, and ranks would train a mixture."""
    others = [node for node, sample in samples.items() if sample != samples[0]]
    if others:
        some = f"node {others[0]} holds" if len(others) == 1 else f"{len(others)} nodes, {others[0]} among them, hold"
        raise CheckpointError(
            f"{path} of {some} another model than that of node 0",
            "copy the folder of one node to all, or name a folder that they share",
        )


def _wanted(
    strategy: Strategy, source: Source, name_there: Callable[[str], str | None], resized: Collection[str] = ()
) -> tuple[dict[Range, _Wanted], dict[str, _Added]]:
    """The ranges of the source that this rank keeps, sorted; and by name in the source, the new rows that it keeps.

    Raises:
        CheckpointError: the source lacks weights of the model, or has them in other shapes.
    """
    shards = [
        (there, s)
        for s in strategy.load_targets()
        if s.name.startswith(("model.", "ema.", "buffer."))
        and (there := name_there(s.name.partition(".")[2])) is not None
    ]
    held = {name.partition(".")[2]: (name, info) for name, info in source.tensors.items()}
    held |= {alias: held[name] for alias, name in source.ties.items() if name in held}
    shift = _shift([there for there, s in shards if s.name.startswith("model.")], held)
    found: dict[Range, _Wanted] = {}
    added: dict[str, _Added] = {}
    missing = dict[str, None]()
    for there, shard in shards:
        fqn = _moved(there, shift)
        if fqn not in held:
            if not shard.name.startswith("buffer."):  # those are computed; transformers does not save all of them
                missing[fqn] = None
            continue
        name, info = _fitting(*held[fqn], fqn, shard, source, there in resized)
        n_old = max(0, min(shard.local.numel(), math.prod(info.shape) - shard.start))
        if n_old:
            place = (name, shard.start, n_old)
            found.setdefault(place, _Wanted(info)).targets.append(shard.local[:n_old])
        if n_old < shard.local.numel():
            part = added.setdefault(name, _Added((info.shape[0], shard.shape[0])))
            part.targets.append((shard.start + n_old, shard.local[n_old:]))
    if missing:
        raise CheckpointError(f"{source.path} has no {_few(list(missing))}", _FIX)
    return dict(sorted(found.items())), added


def _say_left(source: Source, used: set[str]) -> None:
    left = sorted(name.partition(".")[2] for name in set(source.tensors) - used)
    if left:
        _LOG.warning("%s holds %s, which the model has no place for", source.path, _few(left))


Shift = tuple[str, str]
"""(prefix to remove from the model's names, prefix to add instead) to get the source's names."""


def _shift(wanted: list[str], held: Mapping[str, object]) -> Shift:
    """Find the prefix by which the source's names differ, if any: from a wrapper, or from a task's heads."""
    for name in wanted:
        if name in held:
            return "", ""
    for name in wanted:
        for other in held:
            if other.endswith(f".{name}") and _fits(("", other.removesuffix(name)), wanted, held):
                return "", other.removesuffix(name)
            if name.endswith(f".{other}") and _fits((name.removesuffix(other), ""), wanted, held):
                return name.removesuffix(other), ""
    return "", ""


def _fits(shift: Shift, wanted: list[str], held: Mapping[str, object]) -> bool:
    return all(_moved(name, shift) in held for name in wanted)


def _moved(name: str, shift: Shift) -> str:
    return shift[1] + name.removeprefix(shift[0])


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _fitting(
    name: str, info: TensorInfo, fqn: str, shard: Shard, source: Source, may_grow: bool
) -> tuple[str, TensorInfo]:
    there, here = tuple(info.shape), tuple(shard.shape)
    if there != here and not (may_grow and there[1:] == here[1:] and 0 < there[0] < here[0]):
        raise CheckpointError(f"{fqn} is {list(info.shape)} in {source.path}, {list(shard.shape)} in this run", _FIX)
    if info.dtype.is_floating_point != shard.local.dtype.is_floating_point:
        raise CheckpointError(f"{fqn} is {info.dtype} in {source.path}, {shard.local.dtype} in this run", _FIX)
    return name, info


def _read(
    source: Source,
    wanted: Mapping[Range, _Wanted],
    nodes: Sequence[tuple[int, list[Range]]],
    world: World,
    group: dist.ProcessGroup,
) -> CheckpointError | None:
    """Fill every range; returns the first problem of this rank, which goes on so that the others do not wait for it.

    Args:
        nodes: each rank's node, and the ranges that it wants.
    """
    problem: CheckpointError | None = None
    own = world.env.node_rank
    holders: dict[Range, list[int]] = {}
    for rank, (node, ranges) in enumerate(nodes):
        for place in ranges if node == own else ():
            holders.setdefault(place, []).append(rank)
    alike: dict[tuple[int, ...], list[Range]] = {}
    for place in wanted:
        alike.setdefault(tuple(holders[place]), []).append(place)
    buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)
    for ranks, places in sorted(alike.items()):  # in one order on every rank: no two wait for each other
        for index, bucket in enumerate(_in_buckets({place: wanted[place].info for place in places})):
            failed = _fill(source, wanted, bucket, buffer, world.rank, _turned(ranks, index), group, problem)
            problem = problem or failed
    return problem


def _add_rows(
    source: Source,
    added: Mapping[str, _Added],
    rows: Mapping[str, tuple[int, int]],
    world: World,
    group: dist.ProcessGroup,
) -> CheckpointError | None:
    """Fill the new rows with the mean of the old ones; returns this rank's problem.

    Args:
        rows: name in the source → its rows there and here, of every tensor with new rows on any rank.
    """
    problem: CheckpointError | None = None
    for name in rows:
        mean = torch.zeros(math.prod(source.tensors[name].shape[1:]), dtype=torch.float64)
        if world.is_main and problem is None:
            try:
                mean = _mean_row(source, name)
            except CheckpointError as error:
                problem = error
        dist.broadcast(mean, src=0, group=group)
        for start, target in added[name].targets if name in added else ():
            _repeat(mean, start, target)
    return problem


def _mean_row(source: Source, name: str) -> torch.Tensor:
    """The mean row of a tensor, float64, summed in the rows' order by one thread."""
    info = source.tensors[name]
    n_rows, row = info.shape[0], math.prod(info.shape[1:])
    at_once = max(1, PIECE_BYTES // (16 * row))  # float64, and room for its sum
    total = np.zeros(row, dtype=np.float64)
    for first in range(0, n_rows, at_once):
        piece = torch.empty(min(at_once, n_rows - first) * row, dtype=info.dtype)
        source.read_into(name, first * row, piece)
        total += piece.to(torch.float64).view(-1, row).numpy().sum(axis=0)
    return torch.from_numpy(total / n_rows)


@torch.no_grad()
def _repeat(row: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Fill `out`, which begins at element `start` of a flattened tensor, with copies of a row."""
    row = row.roll(-(start % len(row)))
    whole = len(out) - len(out) % len(row)
    out[:whole].view(-1, len(row)).copy_(row)
    out[whole:].copy_(row[: len(out) - whole])


def _in_buckets(infos: Mapping[Range, TensorInfo]) -> Iterator[list[_Piece]]:
    """The pieces of the ranges in order, in groups that fill the buffer."""
    bucket, used = list[_Piece](), 0
    for place, info in infos.items():
        size, first = info.dtype.itemsize, 0
        while first < place[2]:
            numel = min(place[2] - first, (_BUFFER_BYTES - used) // size)
            bucket.append(_Piece(place, first, numel, used))
            first, used = first + numel, _aligned(used + numel * size)
            if used == _BUFFER_BYTES:
                yield bucket
                bucket, used = [], 0
    if bucket:
        yield bucket


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _turned(ranks: Sequence[int], by: int) -> list[int]:
    """The ranks in a ring, from another one on: where a bucket needs few readers, all take turns."""
    return [ranks[(index + by) % len(ranks)] for index in range(len(ranks))]


@torch.no_grad()
def _fill(
    source: Source,
    wanted: Mapping[Range, _Wanted],
    bucket: Sequence[_Piece],
    buffer: torch.Tensor,
    rank: int,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    problem: CheckpointError | None,
) -> CheckpointError | None:
    """Read a bucket and copy it into the run's own dtype (masters are fp32: no bit is lost); returns the problem.

    Args:
        buffer: bytes that hold a bucket; one for all, as freed ones would stay with the allocator.
        ranks: those that want its ranges; the first of them each read a part and send it to the others, in place.
        group: one that exists: a group of the same ranks made a second time may find addresses of the first one.
        problem: if there is one already, this rank reads no more.
    """
    pieces = [(one, _elements(buffer, one, wanted[one.place].info)) for one in bucket]
    end = max(one.offset + held.nbytes for one, held in pieces)
    share = _aligned(-(-end // min(len(ranks), -(-end // _MESSAGE_BYTES))))
    parts = [(sharer, at, min(at + share, end)) for sharer, at in zip(ranks, range(0, end, share), strict=False)]
    for sharer, low, high in parts:
        try:
            if sharer == rank and problem is None:
                _read_between(source, pieces, low, high)
        except CheckpointError as error:
            problem = error
    under_way = list[dist.Work | None]()
    for sharer, low, high in parts:
        if sharer == rank:
            under_way += [dist.isend(buffer[low:high], dst=other, group=group) for other in ranks if other != rank]
        else:
            under_way.append(dist.irecv(buffer[low:high], src=sharer, group=group))
    for message in under_way:
        assert message is not None  # this rank is one of the group
        message.wait()
    for one, held in pieces:
        for target in wanted[one.place].targets:
            target[one.first : one.first + one.numel].copy_(held)
    return problem


def _elements(buffer: torch.Tensor, piece: _Piece, info: TensorInfo) -> torch.Tensor:
    return buffer[piece.offset : piece.offset + piece.numel * info.dtype.itemsize].view(info.dtype)


def _read_between(source: Source, pieces: Iterable[tuple[_Piece, torch.Tensor]], low: int, high: int) -> None:
    """Read the elements of the pieces that lie in the bytes [low, high) of the bucket, both at element boundaries."""
    for one, held in pieces:
        size = held.element_size()
        first, last = max(low - one.offset, 0) // size, min(high - one.offset, held.nbytes) // size
        if first < last:
            name, start, _ = one.place
            source.read_into(name, start + one.first + first, held[first:last])
