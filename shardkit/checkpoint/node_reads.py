"""Read ranges that several ranks of a node need, each byte once a node.

Ranks that need the same ranges each read a part of a bucket and send it to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..parallel.runs import Runs
from ..parallel.world import World
from .native.reader import TensorSpec, read_runs

MESSAGE_BYTES = 2**18
"""A bucket has at most one reader for every so many of its bytes, so that many ranks do not make many messages."""
_ALIGNMENT = 16
"""Bytes; a multiple of every element's size."""


class Range(NamedTuple):
    """Elements of a tensor of the source."""

    name: str
    runs: Runs


ReadInto = Callable[[str, int, torch.Tensor], None]
"""(name, first element, 1-D tensor on the CPU that is filled), as of `Source` and `CheckpointReader`."""


@dataclass
class Destination:
    """This rank's memory that one range of the source fills: a weight, and its moving average if there is one."""

    spec: TensorSpec
    targets: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Piece:
    """A part of a range that travels in one bucket."""

    source_range: Range
    start: int  # index of its first element, counted in the range
    numel: int
    offset: int  # its first byte in the bucket

    def bytes_in(self, buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """The piece's elements as a view of the bucket."""
        return buffer[self.offset : self.offset + self.numel * spec.dtype.itemsize].view(spec.dtype)


@torch.no_grad()
def read_ranges(
    read_into: ReadInto,
    destinations: Mapping[Range, Destination],
    ranges_by_rank: Sequence[tuple[int, list[Range]]],
    world: World,
    group: dist.ProcessGroup,
    bucket_bytes: int,
    block_bytes: int = _ALIGNMENT,
) -> CheckpointError | None:
    """Fill the memory of every range; returns this rank's first problem. Collective.

    A rank with a problem goes on exchanging messages, so that no other rank waits for it forever. `ranges_by_rank`:
    each rank's node, and the ranges that it needs. `bucket_bytes`: host memory that the exchange takes. `block_bytes`:
    ranges are cut at multiples of it: readers that check blocks would read a block that is cut twice.
    """
    block_bytes = math.lcm(block_bytes, _ALIGNMENT)  # so that no element is cut
    block_bytes = block_bytes if block_bytes <= bucket_bytes else _ALIGNMENT
    problem: CheckpointError | None = None
    readers: dict[Range, list[int]] = {}
    for rank, (node, ranges) in enumerate(ranges_by_rank):
        for source_range in ranges if node == world.env.node_rank else ():
            readers.setdefault(source_range, []).append(rank)
    by_readers: dict[tuple[int, ...], dict[Range, TensorSpec]] = {}
    for source_range, destination in destinations.items():
        by_readers.setdefault(tuple(readers[source_range]), {})[source_range] = destination.spec
    buffer = torch.empty(bucket_bytes if by_readers else 0, dtype=torch.uint8)
    for ranks, specs in sorted(by_readers.items(), key=lambda entry: entry[0]):  # one order on every rank: no deadlock
        for index, bucket in enumerate(_buckets(specs, bucket_bytes, block_bytes)):
            turn = index % len(ranks)  # a bucket that needs few readers takes the first ones, so all ranks take turns
            parts = _parts(bucket, (*ranks[turn:], *ranks[:turn]), destinations, block_bytes)
            pieces = [(piece, piece.bytes_in(buffer, destinations[piece.source_range].spec)) for piece in bucket]
            for reader, low, high in parts:
                try:
                    if reader == world.rank and problem is None:
                        for piece, elements in pieces:  # the part's elements of each piece
                            size, end_byte = elements.element_size(), min(high - piece.offset, elements.nbytes)
                            start, end = max(low - piece.offset, 0) // size, end_byte // size
                            if start < end:
                                name, runs = piece.source_range
                                read_runs(read_into, name, runs, piece.start + start, elements[start:end])
                except CheckpointError as error:
                    problem = error
            messages = list[dist.Work | None]()
            for reader, low, high in parts:
                part = buffer[low:high]
                if reader == world.rank:
                    messages += [dist.isend(part, dst=peer, group=group) for peer in ranks if peer != reader]
                else:
                    messages.append(dist.irecv(part, src=reader, group=group))
            for message in messages:
                assert message is not None  # this rank is in the group
                message.wait()
            for piece, elements in pieces:
                for target in destinations[
                    piece.source_range
                ].targets:  # fp32 masters take any type without losing a bit
                    target[piece.start : piece.start + piece.numel].copy_(elements)
    return problem


def _buckets(specs: Mapping[Range, TensorSpec], bucket_bytes: int, block_bytes: int) -> Iterator[list[_Piece]]:
    """Cut the ranges into pieces, in order, and yield the pieces of one bucket at a time."""
    bucket, used = list[_Piece](), 0
    for source_range, spec in specs.items():
        size, start, end = spec.dtype.itemsize, 0, source_range.runs.length
        while start < end:
            room = bucket_bytes - used
            numel = end - start if (end - start) * size <= room else room // block_bytes * block_bytes // size
            if numel:
                bucket.append(_Piece(source_range, start, numel, used))
                start, used = start + numel, _aligned(used + numel * size)
            if start < end or used == bucket_bytes:
                yield bucket
                bucket, used = [], 0
    if bucket:
        yield bucket


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _parts(
    bucket: Sequence[_Piece], ranks: Sequence[int], destinations: Mapping[Range, Destination], block_bytes: int
) -> list[tuple[int, int, int]]:
    """(reader, first byte, end) of each part of a bucket: even ones, cut at blocks of the ranges."""
    sizes = [piece.numel * destinations[piece.source_range].spec.dtype.itemsize for piece in bucket]
    end = bucket[-1].offset + sizes[-1]
    n_readers = min(len(ranks), -(-end // MESSAGE_BYTES))
    cuts = [0]
    for number in range(1, n_readers):
        wanted = end * number // n_readers
        piece, size = next((p, n) for p, n in zip(bucket, sizes, strict=True) if wanted < _aligned(p.offset + n))
        blocks = (wanted - piece.offset + block_bytes // 2) // block_bytes
        cuts.append(min(piece.offset + blocks * block_bytes, _aligned(piece.offset + size)))
    spans = zip(ranks, cuts, [*cuts[1:], end], strict=False)
    return [(reader, low, high) for reader, low, high in spans if low < high]
