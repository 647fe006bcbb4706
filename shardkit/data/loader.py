"""Optimizer steps of ready micro-batches, loaded in this process or by workers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from ..errors import ShardkitError
from .order import BatchSchedule, State

Batch = Any
Collate = Callable[[list[Any]], Batch]


class MapDataset(Protocol):
    """`len()` and integer indexing."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank.

    Attributes:
        micro_batches: (batch, is_filler) pairs, the same number on every rank; a filler keeps a rank in step when it
            has no samples left: it goes through forward and backward with weight 0 and its targets do not count.
        state_after: where to continue once the step is done.
    """

    micro_batches: list[tuple[Batch, bool]]
    state_after: State


class StepLoader:
    """Iterates over optimizer steps from `state` on, epoch after epoch, `n_steps` of them or without end.

    With `workers` > 0, that many processes load ahead, `prefetch` micro-batches each; they live until `close`, across
    epochs. With 0, samples are loaded on demand. The samples are the same either way.

    Args:
        collate: makes a micro-batch of a list of samples; `default_collate` when None.
        pin_memory: copy batches to page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        dataset: MapDataset,
        schedule: BatchSchedule,
        collate: Collate | None = None,
        *,
        state: State | None = None,
        n_steps: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self._schedule = schedule
        self._state = state or State()
        self._steps_left = n_steps
        together = collate or default_collate
        loader: DataLoader[Any] = DataLoader(
            _InWorker(dataset) if workers else dataset,  # type: ignore[arg-type]
            batch_sampler=_micro_batches(schedule, self._state, n_steps),
            collate_fn=partial(_collate_or_error, together) if workers else together,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            pin_memory=pin_memory,
            # Without its own, it draws a seed from the global generator, and dropout would depend on the loader.
            generator=torch.Generator().manual_seed(schedule.seed * schedule.world + schedule.rank),
        )
        with _fork_without_garbage():
            self._batches: Iterator[Batch] | None = iter(loader)

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> StepBatch:
        if self._batches is None:
            raise RuntimeError("StepLoader is closed")
        if self._steps_left == 0:
            raise StopIteration
        parts, after = self._schedule.micro_batches(self._state)
        step = StepBatch([(_checked(next(self._batches)), not part) for part in parts], after)
        self._state = after
        if self._steps_left is not None:
            self._steps_left -= 1
        return step

    def close(self) -> None:
        """End the workers. May be called twice."""
        # Dropping the last reference to DataLoader's iterator is its public way to join the worker processes.
        self._batches = None


@contextmanager
def _fork_without_garbage() -> Iterator[None]:
    """Processes forked in this block never collect what is garbage in this one.

    Destructors of process groups and stores join threads, which a fork does not have: a worker would wait for ever.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def _micro_batches(schedule: BatchSchedule, state: State, n_steps: int | None) -> Iterator[list[int]]:
    """The schedule's micro-batches in order, with the first sample in place of an empty one."""
    for _ in itertools.count() if n_steps is None else range(n_steps):
        parts, state = schedule.micro_batches(state)
        yield from (part or [0] for part in parts)


class _InWorker:
    """A dataset whose errors for users are samples: DataLoader would make a worker's traceback their text."""

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except ShardkitError as error:
            return error


def _collate_or_error(collate: Collate, samples: list[Any]) -> Batch:
    try:
        return collate([_checked(sample) for sample in samples])
    except ShardkitError as error:
        return error


def _checked(value: Any) -> Any:
    if isinstance(value, ShardkitError):
        raise value
    return value


def eval_batches(
    dataset: MapDataset,
    micro_batch: int,
    rank: int,
    world: int,
    limit: int | None = None,
    collate: Collate | None = None,
) -> Iterator[tuple[Batch, bool]]:
    """This rank's evaluation micro-batches as (batch, is_filler): the same number on every rank.

    The samples are the same for every `micro_batch` and `world`, each once. Micro-batches are dealt to the ranks in
    turn; a rank without one in the last round gets the first sample as a filler.

    Args:
        limit: samples over all ranks; evenly spaced ones represent a larger dataset. `None` = every sample.
    """
    together = collate or default_collate
    n = len(dataset)
    n_used = n if limit is None else min(n, limit)
    for round_start in range(0, n_used, micro_batch * world):
        start = round_start + rank * micro_batch
        indices = [position * n // n_used for position in range(start, min(start + micro_batch, n_used))]
        yield together([dataset[i] for i in indices or [0]]), not indices
