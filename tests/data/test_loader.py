from __future__ import annotations

import gc
import multiprocessing

import pytest
import torch
import torch.distributed as dist

from shardkit.data.loader import BatchSchedule, State, StepLoader, eval_batches
from shardkit.errors import DataError


class Squares:
    """Sample i is i²."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


class Broken(Squares):
    """Sample 3 raises an error of this kind."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__(10)
        self.kind = kind

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            raise self.kind("sample 3 is bad", "mend it")
        return super().__getitem__(index)


def schedule(n: int = 10, rank: int = 0, world: int = 2) -> BatchSchedule:
    return BatchSchedule(n, 4 * world, 2, 2, rank, world, seed=3, shuffle=True, drop_last=False)


def drain(loader: StepLoader) -> list[tuple[list[tuple[list[int], bool]], State]]:
    steps = [([(b.tolist(), f) for b, f in step.micro_batches], step.state_after) for step in loader]
    loader.close()
    return steps


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_the_plan_whoever_loads_them(workers: int) -> None:
    for rank in range(2):
        expected, state = [], State()
        for _ in range(5):
            parts, state = schedule(rank=rank).micro_batches(state)
            expected.append(([([i**2 for i in part] or [-1], not part) for part in parts], state))
        loader = StepLoader(
            Squares(10), schedule(rank=rank), n_steps=5, workers=workers, filler=lambda batch: batch - 1
        )
        assert drain(loader) == expected


def test_close_ends_the_workers_and_further_use_is_refused() -> None:
    before = set(multiprocessing.active_children())
    loader = StepLoader(Squares(100), schedule(100), n_steps=50, workers=2)
    next(loader)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    loader.close()
    loader.close()
    for worker in started:
        worker.join(60)  # torch waits 5 s for it, then kills it
        assert not worker.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_random_state_is_left_alone(workers: int) -> None:
    before = torch.get_rng_state()
    drain(StepLoader(Squares(10), schedule(), n_steps=2, workers=workers))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "shown"), [(RuntimeError, "sample 3 is"), (DataError, r"^sample 3 is bad\n  fix: mend it$")]
)
def test_an_error_in_a_dataset_reaches_the_caller_whoever_loads(
    workers: int, kind: type[Exception], shown: str
) -> None:
    loader = StepLoader(Broken(kind), schedule(), n_steps=20, workers=workers)
    with pytest.raises(kind, match=shown):
        drain(loader)
    loader.close()
    gc.collect()  # the error's traceback holds the iterator, which ends its workers when it goes


class Collecting(Squares):
    """Python may collect garbage at any moment; here it does in each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return super().__getitem__(index)


@pytest.mark.timeout(60)
def test_workers_leave_what_was_garbage_before_they_started() -> None:
    """To destroy gloo's group joins its threads, which a forked process does not have."""
    cycle: list[object] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
    cycle.append(cycle)
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.disable()
    try:
        del cycle
        loader = StepLoader(Collecting(10), schedule(), n_steps=1, workers=1)
        assert drain(loader) == drain(StepLoader(Squares(10), schedule(), n_steps=1))
    finally:
        gc.enable()
    assert gc.get_freeze_count() == frozen, "this process collects as before"
    gc.collect()


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize(
    ("n", "world", "limit"),
    [(10, 3, None), (7, 1, None), (1, 4, None), (100, 2, 12), (100, 3, 7), (10, 4, 50), (9, 2, 0)],
)
def test_evaluation_takes_the_same_samples_once_whatever_the_ranks(
    n: int, world: int, limit: int | None, micro_batch: int
) -> None:
    ranks = [list(eval_batches(Squares(n), micro_batch, rank, world, limit)) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1, "ranks stay in step"
    taken = sorted(s for rank in ranks for batch, is_filler in rank if not is_filler for s in batch.tolist())
    alone = [s for batch, _ in eval_batches(Squares(n), n, 0, 1, limit) for s in batch.tolist()]
    assert taken == alone
    assert len(taken) == len(set(taken)) == (n if limit is None else min(n, limit))


def test_limited_evaluation_covers_the_whole_dataset() -> None:
    taken = [s**0.5 for batch, _ in eval_batches(Squares(100), 5, 0, 1, limit=10) for s in batch.tolist()]
    assert taken == pytest.approx(list(range(0, 100, 10)))
