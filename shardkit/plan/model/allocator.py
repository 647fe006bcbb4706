"""PyTorch's CUDA caching allocator, replayed over a log of tensors: bytes reserved, and bytes it cannot release.

After c10/cuda/CUDACachingAllocator.cpp (torch 2.9 to 2.13): sizes are rounded up to 512 B. Blocks up to 1 MiB come from
segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, larger ones get their own segment, rounded to 2 MiB. The
smallest sufficient free block is taken and split; free neighbours merge; blocks belong to the stream that asked for
them. With expandable segments each stream and pool has one segment that grows by pages of 2 or 20 MiB. A free block
before unmapped pages counts as large as it can grow: it is taken only if no other block suffices. Emptying the cache
unmaps whole free pages; later growth fills the first such gap that is long enough.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...memory.tracing.events import EventLog

ROUND = 512
_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
_MEDIUM, _MEDIUM_SEGMENT = 10 * 2**20, 20 * 2**20
_LARGE_ROUND = 2 * 2**20


class Full(Exception):
    """A segment does not fit below the limit, even without the cached ones."""


class _Block:  # a piece of a segment
    __slots__ = ("address", "after", "arena", "before", "free", "mapped", "segment", "size")

    def __init__(self, address: int, size: int, arena: _Arena, segment: int) -> None:
        self.address, self.size, self.arena, self.segment = address, size, arena, segment
        self.free = self.mapped = True
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Arena:
    """The free blocks of one stream's pool, smallest first; of an expandable segment also the gaps and the end."""

    def __init__(self, small: bool, smooth: bool) -> None:
        self.small, self.smooth = small, smooth
        self.reserved = 0
        self.free: list[tuple[int, int, _Block]] = []
        self.tail: _Block | None = None
        self.gaps: list[_Block] = []

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address, block), key=lambda item: item[:2])

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address), key=lambda item: item[:2])]

    def take(self, size: int) -> _Block | None:
        """The smallest sufficient block, by the sizes to which blocks can grow."""
        index = bisect_left(self.free, size, key=lambda item: item[0])
        if not self.smooth:
            while index + 1 < len(self.free) and self._room(index + 1) < self._room(index):
                index += 1
        return self.free.pop(index)[2] if index < len(self.free) else None

    def _room(self, index: int) -> float:
        block, after = self.free[index][2], self.free[index][2].after
        return math.inf if block is self.tail else block.size + (0 if after is None or after.mapped else after.size)


def _run(gap: _Block, size: int) -> list[_Block]:
    """Free and unmapped blocks that have room, from a gap (or the free block before it) on; empty if they lack it."""
    block = gap.before if gap.before is not None and gap.before.free and gap.before.mapped else gap
    run, room = [block], block.size
    while room < size and block.after is not None:
        block = block.after
        if not block.free:
            return []
        run.append(block)
        room += block.size
    return run


def _growing(arena: _Arena, size: int) -> list[_Block]:
    """The free and unmapped blocks that grow to `size`: from the first gap with room on, or the last block."""
    for gap in arena.gaps:
        if run := _run(gap, size):
            return run
    tail = arena.tail
    return [tail] if tail is not None and tail.free else []


class CachingAllocator:
    """Allocate and free blocks as torch would on an empty GPU.

    `expandable`: one growing segment per stream and pool, instead of many. `page`: page size of expandable segments in
    bytes; default: torch's. Small pages make `reserved` grow smoothly. `limit`: bytes of the GPU; `malloc` raises
    `Full` where torch runs out of memory. `allocated`, `reserved`: bytes in blocks that are in use, bytes of segments.
    `required`: bytes of segments (of pages, if expandable) that hold a block in use, and stay after the cache is
    released. `peak_allocated`, `peak_reserved`, `peak_required`: the largest values of these three.
    """

    def __init__(self, expandable: bool, page: int | None = None, limit: float = math.inf) -> None:
        self.expandable = expandable
        self._page = page
        self._limit = limit
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
            arena = self.arenas[stream, small] = _Arena(small, self._page is not None)
        block = arena.take(size) or (self._grown(arena, size) if self.expandable else self._new_segment(arena, size))
        surplus = block.size - size
        if surplus >= ROUND if small or self.expandable else surplus > _SMALL:
            arena.add(self._cut(block, size))
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
        if after is not None and after.free and after.mapped:
            arena.remove(after)
            self._merge(block, after)
        if before is not None and before.free and before.mapped:
            arena.remove(before)
            self._merge(before, block)
            block = before
        arena.add(block)

    def _new_segment(self, arena: _Arena, size: int) -> _Block:
        large = _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _LARGE_ROUND) * _LARGE_ROUND
        segment_size = _SMALL_SEGMENT if arena.small else large
        if self.reserved + segment_size > self._limit:
            self.release()
            if self.reserved + segment_size > self._limit:
                raise Full
        self._next += 1
        self._count(arena, segment_size)
        self._sizes[self._next] = segment_size
        return _Block(self._next << 44, segment_size, arena, self._next)

    def _grown(self, arena: _Arena, size: int) -> _Block:
        """A free block of at least `size`: mapped from the first gap with room on, else at the segment's end."""
        run = _growing(arena, size)
        if self.reserved + self._growth(arena, run, size) > self._limit:
            self.release()
            run = _growing(arena, size)
            if self.reserved + self._growth(arena, run, size) > self._limit:
                raise Full
        return self._map(arena, run or [self._end(arena)], size)

    def _growth(self, arena: _Arena, run: list[_Block], size: int) -> int:
        return self._pages(arena, max(0, size - sum(block.size for block in run if block.mapped)))

    def _end(self, arena: _Arena) -> _Block:
        """A new block of no bytes behind the last one."""
        tail = arena.tail
        if tail is None:
            self._next += 1
        address = (self._next << 44) if tail is None else tail.address + tail.size
        block = _Block(address, 0, arena, self._next if tail is None else tail.segment)
        block.before = tail
        if tail is not None:
            tail.after = block
        arena.tail = block
        return block

    def _map(self, arena: _Arena, run: list[_Block], size: int) -> _Block:
        """One free block out of a run of free and unmapped ones, with pages mapped for `size` bytes."""
        head = run[0]
        for part in run:
            if not part.mapped:
                arena.gaps.remove(part)
                new_bytes = min(self._pages(arena, size - (part.address - head.address)), part.size)
                if new_bytes < part.size:
                    remainder = self._cut(part, new_bytes)
                    remainder.mapped = False
                    insort(arena.gaps, remainder, key=lambda gap: gap.address)
                part.mapped = True
                self._count(arena, new_bytes)
            elif part.size:
                arena.remove(part)
        for part in run[1:]:
            self._merge(head, part)
        if head.size < size:  # nothing lies behind it
            new_bytes = self._pages(arena, size - head.size)
            head.size += new_bytes
            self._count(arena, new_bytes)
        return head

    def _pages(self, arena: _Arena, n_bytes: int) -> int:
        page = self._page or (_SMALL_SEGMENT if arena.small else _MEDIUM_SEGMENT)
        return -(-n_bytes // page) * page

    def _count(self, arena: _Arena, n_bytes: int) -> None:
        self.reserved += n_bytes
        arena.reserved += n_bytes

    def release(self) -> None:
        """Give free segments back, or the whole free pages of expandable ones, as `torch.cuda.empty_cache` does."""
        for arena in self.arenas.values():
            for _, _, block in list(arena.free):
                if not self.expandable:
                    if block.before is None and block.after is None:
                        arena.remove(block)
                        self._count(arena, -block.size)
                    continue
                start = block.address - (block.segment << 44)
                begin, end = self._pages(arena, start), start + block.size
                end -= end % self._pages(arena, 1)
                if begin < end:
                    self._unmap(arena, block, begin - start, end - begin)

    def _unmap(self, arena: _Arena, block: _Block, offset: int, n_bytes: int) -> None:
        arena.remove(block)
        self._count(arena, -n_bytes)
        if offset:
            remainder = self._cut(block, offset)
            arena.add(block)
            block = remainder
        if n_bytes < block.size:
            arena.add(self._cut(block, n_bytes))
        block.mapped = False
        if arena.tail is block:  # the segment ends earlier
            arena.tail = block.before
            if block.before is not None:
                block.before.after = None
            return
        insort(arena.gaps, block, key=lambda gap: gap.address)
        for lower, upper in ((block, block.after), (block.before, block)):
            if lower is not None and upper is not None and not lower.mapped and not upper.mapped:
                arena.gaps.remove(upper)
                self._merge(lower, upper)

    def _cut(self, block: _Block, size: int) -> _Block:
        """Shorten a block; returns the rest, free and in no list."""
        remainder = _Block(block.address + size, block.size - size, block.arena, block.segment)
        remainder.before, remainder.after = block, block.after
        if block.after is not None:
            block.after.before = remainder
        block.after, block.size = remainder, size
        if block.arena.tail is block:
            block.arena.tail = remainder
        return remainder

    def _merge(self, lower: _Block, upper: _Block) -> None:
        lower.size += upper.size
        lower.after = upper.after
        if upper.after is not None:
            upper.after.before = lower
        if lower.arena.tail is upper:
            lower.arena.tail = lower

    def _use(self, block: _Block, change: int) -> None:
        """Count this block as in use (1) or free (-1) in its segment, or in every page that it touches."""
        if self._page is not None:
            self.required = self.allocated
            return
        if not self.expandable:
            self._use_page(block.segment, 0, self._sizes[block.segment], change)
            return
        page_size = _SMALL_SEGMENT if block.arena.small else _MEDIUM_SEGMENT
        start = block.address - (block.segment << 44)
        first_page, last_page = start // page_size, (start + block.size - 1) // page_size
        self._use_page(block.segment, first_page, page_size, change)
        if last_page > first_page:
            self._use_page(block.segment, last_page, page_size, change)
            self.required += (last_page - first_page - 1) * page_size * change  # no other block is in those between

    def _use_page(self, segment: int, page: int, page_size: int, change: int) -> None:
        blocks = self._in_use[segment, page]
        self._in_use[segment, page] = blocks + change
        if blocks == 0 or blocks + change == 0:
            self.required += page_size * change


Arena = tuple[int, bool]
"""A stream, numbered in order of first use, and whether this is its pool of small blocks."""


@dataclass(frozen=True)
class Replay:
    """Largest bytes of each kind, over the whole log and by phase."""

    allocated: int  # of whole blocks: in fixed segments a block keeps up to 1 MiB that is not split off
    reserved: int
    required: int
    allocated_by_phase: dict[str, int]
    reserved_by_phase: dict[str, int]
    arenas: dict[Arena, int]  # bytes reserved at the end, by stream and pool


def required(log: EventLog, device: str, expandable: bool, on_a_large_card: Replay) -> int:
    """Bytes of the smallest card on which the segments fit: to a page if expandable, else to 0.25 %.

    A full card's allocator returns its cache and asks again. Later blocks then lie elsewhere than on a large card, and
    leave other pieces that nothing fits into: this can take more than `Replay.required`. Segments of fixed size can
    also take less.
    """
    tolerance, stride = on_a_large_card.reserved // 400, on_a_large_card.reserved // 50
    requests = _requests(log, device)

    def fits(limit: int) -> bool:
        allocator = CachingAllocator(expandable, limit=limit)
        try:
            for _ in _served(requests, allocator):
                pass
        except Full:
            return False
        return True

    high = on_a_large_card.reserved
    if expandable:
        low, tolerance = on_a_large_card.required, _MEDIUM_SEGMENT
        if fits(low):
            return low
    else:
        while high - stride >= on_a_large_card.allocated and fits(high - stride):  # a smaller card may fit by luck
            high -= stride
        low = high - stride
    while high - low > tolerance:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def whole_pages(arenas: dict[Arena, int]) -> int:
    """Bytes that expandable segments of these sizes take from the GPU, in whole pages."""
    pages = {True: _SMALL_SEGMENT, False: _MEDIUM_SEGMENT}
    return sum(-(-n_bytes // pages[small]) * pages[small] for (_, small), n_bytes in arenas.items())


@dataclass(frozen=True)
class _Request:
    storage: int
    n_bytes: int  # the new size; 0 if the storage was freed
    stream: int
    phase: str
    releases: int  # how often the program emptied the allocator's cache just before


def _requests(log: EventLog, device: str) -> list[_Request]:
    requests: list[_Request] = []
    sizes: dict[int, int] = {}
    marks = iter([*log.marks[1:], (len(log.events), "", "")])
    phase, next_mark = log.marks[0][1], next(marks)
    releases = iter([*log.releases, len(log.events)])
    next_release, n_releases = next(releases), 0
    for at, (index, change) in enumerate(log.events):
        while at >= next_mark[0]:
            phase, next_mark = next_mark[1], next(marks)
        while at >= next_release:
            n_releases += 1
            next_release = next(releases)
        allocation = log.allocations[index]
        if allocation.device == device:
            sizes[index] = sizes.get(index, 0) + change
            requests.append(_Request(index, sizes[index], allocation.stream, phase, n_releases))
            n_releases = 0
    if n_releases and requests:  # changes of no size, for releases after the last change
        requests.append(_Request(-1, 0, requests[-1].stream, requests[-1].phase, n_releases))
    return requests


def _served(requests: Sequence[_Request], allocator: CachingAllocator) -> Iterator[_Request]:
    """Each request, after the allocator has served it."""
    blocks: dict[int, _Block] = {}
    streams: dict[int, int] = {}
    for request in requests:
        for _ in range(request.releases):
            allocator.release()
        if (block := blocks.pop(request.storage, None)) is not None:
            allocator.free(block)
        if request.n_bytes > 0:
            stream = streams.setdefault(request.stream, len(streams))
            blocks[request.storage] = allocator.malloc(request.n_bytes, stream)
        yield request


def replay(log: EventLog, device: str, expandable: bool, page: int | None = None) -> Replay:
    """Run every tensor of a device through the allocator of a card without limit, in order."""
    allocator = CachingAllocator(expandable, page)
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}
    for request in _served(_requests(log, device), allocator):
        phase = request.phase
        allocated[phase] = max(allocated.get(phase, 0), allocator.allocated)
        reserved[phase] = max(reserved.get(phase, 0), allocator.reserved)
    arenas = {key: arena.reserved for key, arena in allocator.arenas.items()}
    peaks = allocator.peak_allocated, allocator.peak_reserved, allocator.peak_required
    return Replay(*peaks, allocated, reserved, arenas)
