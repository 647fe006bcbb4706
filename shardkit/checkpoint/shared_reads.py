"""Read ranges that several ranks of a node fill only once: each rank reads a part and sends it to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby

import torch
import torch.distributed as dist

from ..strategies.base import Shard

MESSAGE_BYTES = 64 * 2**20
"""Most bytes that a rank reads and sends at once, and the host memory that the exchange takes."""

Range = tuple[str, int, int]
"""Name of a tensor, first element, number of elements."""
Piece = tuple[Range, int, int, int]
"""A range; the first byte and the number of bytes of a piece of it; and the index of its reader among the ranks that
share the range."""


def key_of(shard: Shard) -> Range:
    """A range that this rank fills, in a form that can be sent to other ranks and compared."""
    return shard.name, shard.start, shard.local.numel()


class SharedReads:
    """Divides the reading of ranges that several ranks of one node fill among these ranks.

    Args:
        shards: this rank's ranges.
        everyone: the `key_of` each of a rank's ranges, and its node, in the order of ranks.
    """

    def __init__(self, shards: Sequence[Shard], everyone: Sequence[tuple[list[Range], int]], rank: int) -> None:
        self._rank = rank
        self._shards = {key_of(shard): shard for shard in shards}
        holders: dict[tuple[int, Range], list[int]] = {}
        for holder, (keys, node) in enumerate(everyone):
            for key in dict.fromkeys(keys):
                holders.setdefault((node, key), []).append(holder)
        self.sets = sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1})
        """Each set of ranks that share ranges; the same on every rank."""
        node = everyone[rank][1]
        self._shared: dict[tuple[int, ...], list[Range]] = {}
        for key in self._shards:
            ranks = tuple(holders[node, key])
            if len(ranks) > 1:
                self._shared.setdefault(ranks, []).append(key)
        for keys in self._shared.values():
            keys.sort()  # so that all ranks that share them divide them in the same way

    def to_read(self) -> list[Shard]:
        """The ranges that this rank reads itself: all that it shares with no rank, and its part of the shared ones."""
        shared = {key for keys in self._shared.values() for key in keys}
        shards = [shard for key, shard in self._shards.items() if key not in shared]
        for ranks, keys in self._shared.items():
            for key, offset, n_bytes, reader in self._pieces(ranks, keys):
                if ranks[reader] == self._rank:
                    shard = self._shards[key]
                    size = shard.local.element_size()
                    part = shard.local.narrow(0, offset // size, n_bytes // size)
                    shards.append(replace(shard, start=shard.start + offset // size, local=part))
        return shards

    def exchange(self, group: dist.ProcessGroup) -> None:
        """Send what this rank has read to the ranks that share it, and fill the rest of its ranges; collective.

        Args:
            group: a gloo group of all ranks.
        """
        for ranks in self.sets:
            with _group_of(ranks, group) as shared_by:
                if self._rank in ranks:
                    self._exchange(ranks, shared_by)

    def _exchange(self, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Exchange the ranges that these ranks share, each message by a broadcast of its reader."""
        for reader, message in _messages(self._pieces(ranks, self._shared[ranks])):
            buffer = torch.empty(sum(n_bytes for _, _, n_bytes, _ in message), dtype=torch.uint8)
            is_reader = ranks[reader] == self._rank
            parts = [
                self._shards[key].local.view(torch.uint8).narrow(0, offset, n_bytes)
                for key, offset, n_bytes, _ in message
            ]
            slots = torch.split(buffer, [n_bytes for _, _, n_bytes, _ in message])
            if is_reader:
                for slot, part in zip(slots, parts, strict=True):
                    slot.copy_(part)
            dist.broadcast(buffer, src=ranks[reader], group=group)
            if not is_reader:
                for slot, part in zip(slots, parts, strict=True):
                    part.copy_(slot)

    def _pieces(self, ranks: tuple[int, ...], keys: Sequence[Range]) -> Iterator[Piece]:
        """Cut the shared ranges into pieces, and assign to each rank an even part of the bytes, rounded to pieces."""
        sizes = [self._shards[key].local.nbytes for key in keys]
        total, at = sum(sizes), 0
        for key, size in zip(keys, sizes, strict=True):
            step = MESSAGE_BYTES // self._shards[key].local.element_size() * self._shards[key].local.element_size()
            for offset in range(0, size, step):
                n_bytes = min(size - offset, step)
                yield key, offset, n_bytes, (at + n_bytes // 2) * len(ranks) // total
                at += n_bytes


def _messages(pieces: Iterator[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    """Group consecutive pieces of one reader into messages; yields (reader, pieces of the message)."""
    for reader, of_reader in groupby(pieces, key=lambda piece: piece[3]):
        message: list[Piece] = []
        for piece in of_reader:
            if message and sum(n_bytes for _, _, n_bytes, _ in message) + piece[2] > MESSAGE_BYTES:
                yield reader, message
                message = []
            message.append(piece)
        yield reader, message


@contextmanager
def _group_of(ranks: tuple[int, ...], group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """A group of these ranks that exists inside the context. All ranks must enter it: they make the group together."""
    if len(ranks) == dist.get_world_size(group):
        yield group
        return
    subgroup = dist.new_group(list(ranks), backend="gloo")
    try:
        yield subgroup
    finally:
        if dist.get_rank() in ranks:
            dist.destroy_process_group(subgroup)
