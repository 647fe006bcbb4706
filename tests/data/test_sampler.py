from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.data.loader import BatchSchedule, EpochOrder, State

# A resumed run must draw what the run before it would have drawn: a change here breaks every checkpoint.
RECORDED = [296, 32, 404, 72, 376, 203, 63, 488]


def schedules(
    n: int, micro: int, accum: int, world: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
) -> list[BatchSchedule]:
    return [
        BatchSchedule(n, micro * accum * world, micro, accum, rank, world, seed, shuffle, drop_last)
        for rank in range(world)
    ]


def step(ranks: list[BatchSchedule], state: State) -> tuple[list[list[list[int]]], State]:
    """Every rank's micro-batches and the state that all agree on."""
    taken = [schedule.micro_batches(state) for schedule in ranks]
    after = {next_state for _, next_state in taken}
    assert len(after) == 1
    return [parts for parts, _ in taken], after.pop()


def samples(parts: list[list[list[int]]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(parts)))


@given(n=st.integers(1, 700), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 5), shuffle=st.booleans())
def test_order_is_a_permutation(n: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = EpochOrder(n, seed, shuffle)
    assert sorted(order.indices(epoch, 0, n).tolist()) == list(range(n))


@given(n=st.integers(2, 2**40), seed=st.integers(0, 100), i=st.integers(0, 2**40))
def test_one_index_equals_the_slice_at_any_size(n: int, seed: int, i: int) -> None:
    order, i = EpochOrder(n, seed, True), i % n
    part = order.indices(3, max(0, i - 2), min(n, i + 3)).tolist()
    assert part[min(i, 2)] == order.indices(3, i, i + 1)[0]
    assert len(set(part)) == len(part)
    assert all(0 <= s < n for s in part)


def test_order_depends_on_seed_and_epoch_and_is_fixed_otherwise() -> None:
    orders = [EpochOrder(100, seed, True).indices(epoch, 0, 100).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == EpochOrder(100, 0, True).indices(0, 0, 100).tolist()
    assert EpochOrder(1000, 0, True).indices(0, 0, 8).tolist() == RECORDED
    assert EpochOrder(10, 0, False).indices(2, 3, 6).tolist() == [3, 4, 5]


@pytest.mark.parametrize("bounds", [(-1, 2), (0, 11), (5, 4)])
def test_positions_outside_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(IndexError):
        EpochOrder(10, 0, True).indices(0, *bounds)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    micro=st.integers(1, 4),
    accum=st.integers(1, 3),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_an_epoch_gives_each_sample_once(n: int, micro: int, accum: int, world: int, drop_last: bool) -> None:
    global_batch = micro * accum * world
    if drop_last and n < global_batch:
        return
    ranks = schedules(n, micro, accum, world, drop_last=drop_last)
    state, seen, steps = State(), [], 0
    while state.epoch == 0:
        parts, state = step(ranks, state)
        sizes = [len(p) for rank in parts for p in rank]
        assert all(len(rank) == accum for rank in parts)
        assert max(sizes) <= micro
        assert max(sizes) - min(sizes) <= 1
        seen += samples(parts)
        steps += 1
    assert state == State(1, 0)
    assert steps == ranks[0].steps_per_epoch
    expected = n - n % global_batch if drop_last else n
    assert len(seen) == len(set(seen)) == expected


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    per_rank=st.integers(1, 24),
    world=st.sampled_from([1, 2, 3, 4]),
    other=st.sampled_from([1, 2, 3, 4]),
    shuffle=st.booleans(),
)
def test_steps_hold_the_same_samples_at_any_world_size(
    n: int, per_rank: int, world: int, other: int, shuffle: bool
) -> None:
    here = schedules(n, per_rank, other, world, shuffle=shuffle)
    there = schedules(n, per_rank, world, other, shuffle=shuffle)
    state = State()
    for _ in range(2 * here[0].steps_per_epoch + 1):
        mine, after = step(here, state)
        others, after_other = step(there, state)
        assert samples(mine) == samples(others)
        assert after == after_other
        state = after


@settings(max_examples=40, deadline=None)
@given(n=st.integers(8, 200), at=st.integers(0, 20))
def test_resuming_with_another_layout_leaves_nothing_out(n: int, at: int) -> None:
    before, after = schedules(n, 2, 1, 4), schedules(n, 3, 1, 1)
    state, seen = State(), []
    for _ in range(at % before[0].steps_per_epoch):
        parts, state = step(before, state)
        seen += samples(parts)
    while state.epoch == 0:
        parts, state = step(after, state)
        seen += samples(parts)
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch": 7}, "global_batch=7"),
        ({"n_samples": 3, "drop_last": True}, "drop_last leaves no step"),
    ],
)
def test_impossible_plans_are_refused(arguments: dict[str, int], message: str) -> None:
    sizes = {
        "n_samples": 10, "global_batch": 4, "micro_batch": 2, "accum": 1, "rank": 0, "world": 2, "drop_last": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        BatchSchedule(**{**sizes, **arguments}, seed=0, shuffle=True)
