"""The replayed allocator rounds, splits, merges and reserves as torch's does."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shardkit.memory.tracing.events import EventLog
from shardkit.plan.model.allocator import CachingAllocator, Full, replay, required

MIB = 2**20


def test_small_and_medium_requests_share_segments_of_2_and_20_mib() -> None:
    allocator = CachingAllocator(expandable=False)
    assert allocator.malloc(1000).size == 1024
    assert allocator.reserved == 2 * MIB
    allocator.malloc(1000)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(5 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.malloc(5 * MIB)
    assert allocator.reserved == 22 * MIB


def test_large_requests_have_segments_of_their_own() -> None:
    allocator = CachingAllocator(expandable=False)
    allocator.malloc(11 * MIB + 1)
    assert allocator.reserved == 12 * MIB


def test_freed_memory_is_kept_and_the_smallest_sufficient_block_used_again_but_not_required() -> None:
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.malloc(size * MIB) for size in (12, 64, 96)]
    for block in blocks:
        allocator.free(block)
    assert (allocator.reserved, allocator.required, allocator.allocated) == (172 * MIB, 0, 0)
    assert (allocator.malloc(40 * MIB).address, allocator.reserved) == (blocks[1].address, 172 * MIB)


@pytest.mark.parametrize(("expandable", "allocated"), [(False, 40 * MIB), (True, 40 * MIB - 2**19)])
def test_a_block_of_a_fixed_segment_keeps_what_is_too_little_to_split_off(expandable: bool, allocated: int) -> None:
    """torch's `memory_allocated` counts the whole block."""
    log = EventLog()
    for n_bytes, freed in ((40 * MIB, True), (40 * MIB - 2**19, False)):
        tensor = log.made("cuda:0", "made")
        log.changed(tensor, n_bytes)
        if freed:
            log.changed(tensor, -n_bytes)
            log.marks.append((len(log.events), "step", ""))
    found = replay(log, "cuda:0", expandable)
    assert found.allocated_by_phase == {"start": 40 * MIB, "step": allocated}
    assert found.allocated == 40 * MIB


def test_a_hole_too_small_reserves_more_without_expandable_segments_only() -> None:
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable)
        first = allocator.malloc(40 * MIB)
        allocator.free(first)
        allocator.malloc(60 * MIB)
        reserved[expandable] = allocator.reserved
    assert reserved == {False: 100 * MIB, True: 60 * MIB}


def test_the_end_of_a_growing_segment_is_the_last_choice() -> None:
    """torch's best fit takes it for as large as it can grow to, so a larger hole is filled first."""
    allocator = CachingAllocator(expandable=True)
    hole, between, end = allocator.malloc(50 * MIB), allocator.malloc(10 * MIB), allocator.malloc(40 * MIB)
    allocator.free(hole)
    allocator.free(end)
    taken = allocator.malloc(40 * MIB)
    assert taken.address == hole.address
    assert allocator.reserved == 100 * MIB
    allocator.malloc(45 * MIB)  # only the end is left for it, and it grows
    assert between.after is not None and allocator.reserved == 120 * MIB


def test_an_emptied_cache_leaves_gaps_that_later_blocks_fill() -> None:
    allocator = CachingAllocator(expandable=True)
    first, kept = allocator.malloc(70 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.release()
    assert allocator.reserved == 40 * MIB, "the kept block lies on two pages"
    again = allocator.malloc(50 * MIB)
    assert again.address == first.address and again.address < kept.address
    assert allocator.reserved == 100 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.free(allocator.malloc(40 * MIB, stream=0))
    allocator.malloc(40 * MIB, stream=1)
    assert allocator.reserved == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_whatever_comes_and_goes_nothing_overlaps_and_all_comes_back(expandable: bool) -> None:
    draw = random.Random(0)
    allocator = CachingAllocator(expandable)
    live = []
    for _ in range(3000):
        if draw.random() < 0.01:
            allocator.release()
            if expandable:
                assert allocator.reserved == allocator.required
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            live.append(allocator.malloc(int(2 ** draw.uniform(5, 26)), draw.randrange(2)))
        assert allocator.allocated <= allocator.required <= allocator.reserved
    spans = sorted((block.address, block.address + block.size) for block in live)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    for block in live:
        allocator.free(block)
    assert (allocator.allocated, allocator.required) == (0, 0)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_small_card_is_never_exceeded(expandable: bool) -> None:
    """It gives its cache back before it refuses, and never later than it would have to."""
    draw, limit, refused = random.Random(0), 600 * MIB, 0
    allocator = CachingAllocator(expandable, limit=limit)
    live = []
    for _ in range(3000):
        if live and draw.random() < 0.45:
            allocator.free(live.pop(draw.randrange(len(live))))
            continue
        size = int(2 ** draw.uniform(5, 26))
        try:
            live.append(allocator.malloc(size, draw.randrange(2)))
        except Full:
            refused += 1
            assert allocator.reserved == allocator.required > limit - size - 40 * MIB
            allocator.free(live.pop(draw.randrange(len(live))))
        assert allocator.allocated <= allocator.required <= allocator.reserved <= limit
    assert refused > 10


def test_a_log_is_replayed_for_one_device_with_growth_streams_and_phases() -> None:
    log = EventLog()
    grows = log.made("cuda:0", "op")
    log.changed(grows, 3 * MIB)
    log.mark(phase="forward")
    log.changed(log.made("cpu", "op"), 100 * MIB)
    log.changed(grows, 3 * MIB)
    log.mark(phase="backward")
    log.stream = lambda: 7
    log.changed(log.made("cuda:0", "op"), 30 * MIB)
    log.changed(grows, -6 * MIB)
    found = replay(log, "cuda:0", expandable=False)
    assert (found.allocated, found.reserved, found.required) == (36 * MIB, 50 * MIB, 50 * MIB)
    assert found.reserved_by_phase == {"start": 20 * MIB, "forward": 20 * MIB, "backward": 50 * MIB}
    assert found.arenas == {(0, False): 20 * MIB, (1, False): 30 * MIB}


def test_a_log_gives_the_cache_back_where_the_program_did() -> None:
    log = EventLog()
    tensor = log.made("cuda:0", "op")
    for mib in [30, -30] * 150:
        log.changed(tensor, mib * MIB)
    log.released()
    log.changed(tensor, 40 * MIB)
    assert replay(log, "cuda:0", expandable=False).reserved == 40 * MIB, "70 MiB if the cache were kept"


def test_a_full_card_can_need_more_than_the_segments_in_use_on_a_large_one() -> None:
    """The large card has cached segments of 30 and 60 MiB; the small one gave them up for 70, and cuts 30 out of it."""
    log = EventLog()

    def change(**sizes: int) -> None:
        for name, mib in sizes.items():
            log.changed(tensors[name], mib * MIB)

    tensors = {name: log.made("cuda:0", "op") for name in ("small", "large", "between", "again", "more")}
    change(small=30, large=60)
    change(small=-30, large=-60)
    change(between=70)
    change(between=-70)
    change(again=30, more=60)
    on_a_large_card = replay(log, "cuda:0", expandable=False)
    assert (on_a_large_card.required, on_a_large_card.reserved) == (90 * MIB, 160 * MIB)
    small = required(log, "cuda:0", expandable=False, on_a_large_card=on_a_large_card)
    assert small == pytest.approx(130 * MIB, rel=0.0025)
