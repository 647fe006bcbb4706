"""Optimizer steps of ready micro-batches, loaded in this process or by workers, and moved to the device."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from ..errors import ConfigError, ShardkitError
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


Change = Callable[[torch.Tensor], torch.Tensor]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device` (asynchronously if pinned); containers keep their types."""
    return map_tensors(
        batch, lambda tensor: tensor.to(device, non_blocking=True), convert=lambda holder: holder.to(device)
    )


def map_tensors(batch: Any, change: Change, convert: Callable[[Any], Any] | None = None) -> Any:
    """The batch with `change(tensor)` in place of each tensor, in new containers of the same types.

    Mappings, lists, tuples, named tuples and dataclasses are walked, frozen ones too; a dataclass is copied without a
    call of its constructor. The given batch is not changed. `convert`: converts other objects that have a method `to`
    of their own, such as torch's `PackedSequence`; None leaves them as they are.
    """
    within = partial(map_tensors, change=change, convert=convert)
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, type):
        return batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: within(member) for key, member in batch.items()})
    if convert is not None and callable(getattr(batch, "to", None)):
        return convert(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(within, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(within, batch))
    if dataclasses.is_dataclass(batch):
        changed = copy.copy(batch)
        names = {field.name for field in dataclasses.fields(batch)} | set(getattr(batch, "__dict__", ()))
        for name in names:
            if hasattr(batch, name):
                object.__setattr__(changed, name, within(getattr(batch, name)))
        return changed
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors that `map_tensors` would change."""
    held: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    map_tensors(batch, note)
    return held


def _like(mapping: Mapping[Any, Any], members: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type with these members."""
    if type(mapping) is dict:
        return members
    try:
        if isinstance(mapping, MutableMapping):
            changed = copy.copy(mapping)
            for key, member in members.items():
                changed[key] = member
            return changed
        return type(mapping)(members)  # type: ignore[call-arg]
    except Exception as error:  # a user's class may raise anything
        if all(member is mapping[key] for key, member in members.items()):
            return mapping
        raise ConfigError(
            f"a batch holds a {type(mapping).__name__}, which cannot be copied with its tensors on another device: "
            f"{type(error).__name__}: {' '.join(str(error).split())}",
            "return a dict, a tuple or a dataclass from the task's collate",
        ) from error
