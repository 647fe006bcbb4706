"""PyTorch's CUDA caching allocator, replayed over a log of tensors: bytes reserved, and bytes it cannot release.

After c10/cuda/CUDACachingAllocator.cpp (torch 2.9 to 2.13): sizes are rounded up to 512 B. Blocks up to 1 MiB come from
segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, larger ones get their own segment, rounded to 2 MiB. The
smallest sufficient free block is taken and split; free neighbours merge; blocks belong to the stream that asked for
them. With expandable segments each stream and pool has one segment that grows by pages of 2 or 20 MiB; its free end is
taken only if no other block suffices.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass

from ...tracing.events import EventLog

ROUND = 512
_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
_MEDIUM, _MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
_LARGE_ROUND = 2 * 2**20


class _Block:
    """A piece of a segment."""

    __slots__ = ("address", "after", "arena", "before", "free", "segment", "size")

    def __init__(self, address: int, size: int, arena: _Arena, segment: int) -> None:
        self.address, self.size, self.arena, self.segment = address, size, arena, segment
        self.free = True
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Arena:
    """The free blocks of one stream's pool, smallest first, and the end of its expandable segment."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.reserved = 0
        self.free: list[tuple[int, int, _Block]] = []
        self.last: _Block | None = None

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address, block), key=lambda item: item[:2])

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address), key=lambda item: item[:2])]

    def take(self, size: int) -> _Block | None:
        """The smallest sufficient block. The end of a growing segment counts as large as it can grow: it comes last."""
        index = bisect_left(self.free, size, key=lambda item: item[0])
        if index + 1 < len(self.free) and self.free[index][2] is self.last:
            index += 1
        return self.free.pop(index)[2] if index < len(self.free) else None


class CachingAllocator:
    """Allocate and free blocks as torch would on an empty, large enough GPU.

    Args:
        expandable: one growing segment per stream and pool, instead of many.
        page: page size of expandable segments in bytes; default: torch's. Small pages make `reserved` grow smoothly.

    Attributes:
        allocated, reserved: bytes in blocks that are in use, bytes of segments.
        required: bytes of segments (of pages, if expandable) that hold a block in use, and stay after the cache is
            released.
        peak_allocated, peak_reserved, peak_required: the largest values of these three.
    """

    def __init__(self, expandable: bool, page: int | None = None) -> None:
        self.expandable = expandable
        self._page = page
        self.allocated = self.reserved = self.required = 0
        self.peak_allocated = self.peak_reserved = self.peak_required = 0
        self.arenas: dict[Arena, _Arena] = {}
        self._in_use: Counter[tuple[int, int]] = Counter()
        self._sizes: dict[int, int] = {}
        self._next = 0

    def malloc(self, n_bytes: int, stream: int = 0) -> _Block:
        size = max(ROUND, -(-n_bytes // ROUND) * ROUND)
        small = size <= _SMALL
        arena = self.arenas.get((stream, small))
        if arena is None:
            arena = self.arenas[stream, small] = _Arena(small)
        block = arena.take(size) or (self._grown(arena, size) if self.expandable else self._new_segment(arena, size))
        rest = block.size - size
        if rest >= ROUND if small or self.expandable else rest > _SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        self._use(block, 1)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_required = max(self.peak_required, self.required)
        return block

    def free(self, block: _Block) -> None:
        self._use(block, -1)
        self.allocated -= block.size
        block.free = True
        arena = block.arena
        after, before = block.after, block.before
        if after is not None and after.free:
            arena.remove(after)
            self._merge(block, after)
        if before is not None and before.free:
            arena.remove(before)
            self._merge(before, block)
            block = before
        arena.add(block)

    def _new_segment(self, arena: _Arena, size: int) -> _Block:
        if arena.small:
            segment_size = _SMALL_SEGMENT
        else:
            segment_size = _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _LARGE_ROUND) * _LARGE_ROUND
        self._next += 1
        self.reserved += segment_size
        arena.reserved += segment_size
        self._sizes[self._next] = segment_size
        return _Block(self._next << 44, segment_size, arena, self._next)

    def _grown(self, arena: _Arena, size: int) -> _Block:
        page = self._page or (_SMALL_SEGMENT if arena.small else _MEDIUM_SEGMENT)
        last = arena.last
        tail = last if last is not None and last.free else None
        more = -(-(size - (tail.size if tail else 0)) // page) * page
        self.reserved += more
        arena.reserved += more
        if tail is not None:
            arena.remove(tail)
            tail.size += more
            return tail
        if last is None:
            self._next += 1
        address = (self._next << 44) if last is None else last.address + last.size
        block = _Block(address, more, arena, self._next if last is None else last.segment)
        block.before = last
        if last is not None:
            last.after = block
        arena.last = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.arena, block.segment)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if block.arena.last is block:
            block.arena.last = rest
        block.arena.add(rest)

    def _merge(self, first: _Block, second: _Block) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if first.arena.last is second:
            first.arena.last = first

    def _use(self, block: _Block, change: int) -> None:
        """Count this block as in use (or free) in its segment, or in every page that it touches."""
        if self._page is not None:
            self.required = self.allocated
            return
        if not self.expandable:
            pages = [(block.segment, 0)]
            page_size = self._sizes[block.segment]
        else:
            page_size = _SMALL_SEGMENT if block.arena.small else _MEDIUM_SEGMENT
            start = block.address - (block.segment << 44)
            pages = [(block.segment, n) for n in range(start // page_size, -(-(start + block.size) // page_size))]
        for page in pages:
            before = self._in_use[page]
            self._in_use[page] = before + change
            if before == 0 or before + change == 0:
                self.required += page_size * change


Arena = tuple[int, bool]
"""A stream, numbered in order of first use, and whether this is its pool of small blocks."""


@dataclass(frozen=True)
class Replay:
    """Largest bytes of each kind, over the whole log and by phase.

    Attributes:
        arenas: bytes reserved at the end, by stream and pool.
    """

    allocated: int
    reserved: int
    required: int
    reserved_by_phase: dict[str, int]
    arenas: dict[Arena, int]


def whole_pages(arenas: dict[Arena, int]) -> int:
    """Bytes that expandable segments of these sizes take from the GPU, in whole pages."""
    total = 0
    for (_, small), n_bytes in arenas.items():
        page = _SMALL_SEGMENT if small else _MEDIUM_SEGMENT
        total += -(-n_bytes // page) * page
    return total


def replay(log: EventLog, device: str, expandable: bool, page: int | None = None) -> Replay:
    """Run every tensor of a device through the allocator, in order."""
    allocator = CachingAllocator(expandable, page)
    held: dict[int, tuple[int, _Block]] = {}
    streams: dict[int, int] = {}
    by_phase: dict[str, int] = {}
    marks = iter([*log.marks[1:], (len(log.events), "", "")])
    phase, upcoming = log.marks[0][1], next(marks)
    for at, (index, change) in enumerate(log.events):
        while at >= upcoming[0]:
            phase, upcoming = upcoming[1], next(marks)
        allocation = log.allocations[index]
        if allocation.device != device:
            continue
        size, block = held.pop(index, (0, None))
        if block is not None:
            allocator.free(block)
        if size + change > 0:
            stream = streams.setdefault(allocation.stream, len(streams))
            held[index] = size + change, allocator.malloc(size + change, stream)
        by_phase[phase] = max(by_phase.get(phase, 0), allocator.reserved)
    arenas = {key: arena.reserved for key, arena in allocator.arenas.items()}
    return Replay(allocator.peak_allocated, allocator.peak_reserved, allocator.peak_required, by_phase, arenas)
