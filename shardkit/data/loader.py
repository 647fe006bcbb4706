"""Optimizer steps of ready micro-batches, loaded in this process or by workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, default_collate

from ..errors import ShardkitError
from ..files import fork_without_garbage

# The order in which samples are drawn: a function of (seed, epoch, position), whatever the number of ranks.


def generator_of(seed: int, *labels: str | int) -> np.random.Generator:
    """A separate generator for each (seed, what), e.g. `generator_of(0, "crop", "train", index)`."""
    key = "\0".join(map(str, (seed, *labels))).encode()
    return np.random.Generator(
        np.random.Philox(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little"))
    )


_ROUNDS = 8
_WORD = np.uint64


class EpochOrder:
    """A permutation of range(n) for each epoch, in O(1) memory for any n.

    Shuffled, position i holds E(i) for a keyed Feistel network E over the smallest even number of bits that covers n,
    applied again until the value falls below n (cycle walking: Black and Rogaway 2002, section 3; at most 4 times on
    average). The keys come from (seed, epoch), so the order can be read from any position without drawing the earlier
    samples.
    """

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        if n < 1:
            raise ValueError(f"n={n} must be positive")
        self.n = n
        self.seed = seed
        self.shuffle = shuffle
        self._half_bits = max(1, -(-(n - 1).bit_length() // 2))

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        if not 0 <= start <= stop <= self.n:
            raise IndexError(f"positions [{start}, {stop}) of {self.n}")
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples at these positions of the epoch."""
        if not self.shuffle:
            return places
        keys = self._keys(epoch)
        values = self._encrypt(places.astype(_WORD), keys)
        while (outside := values >= self.n).any():
            values[outside] = self._encrypt(values[outside], keys)
        return values.astype(np.int64)

    def _keys(self, epoch: int) -> npt.NDArray[np.uint64]:
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8").astype(_WORD)

    def _encrypt(self, values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        bits = _WORD(self._half_bits)
        mask = _WORD((1 << self._half_bits) - 1)
        high, low = values >> bits, values & mask
        for key in keys:
            high, low = low, high ^ (_mix(low + key) & mask)
        result: npt.NDArray[np.uint64] = (high << bits) | low
        return result


class Order(Protocol):
    """Which sample stands at each of an epoch's `n` positions."""

    n: int

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The samples at positions [start, stop) of the epoch."""
        ...


class MixOrder:
    """Several data sets, one behind the other, of which each epoch takes a number of passes: `weights`.

    An epoch has round(weight × size) samples of each data set (at least one), in an order of their own. The places of a
    data set run on from epoch to epoch through permutations of it, so over the epochs its samples are taken equally
    often; with weight 0.5, two epochs take each sample once. Unshuffled, the data sets follow one another.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        self.seed = seed
        self._sizes = np.array(sizes, dtype=np.int64)
        self._taken = np.array([max(1, round(n * w)) for n, w in zip(sizes, weights, strict=True)], dtype=np.int64)
        self._ends = np.cumsum(self._taken)
        self.n = int(self._ends[-1])
        self._places = EpochOrder(self.n, seed, shuffle)
        self._within = [
            EpochOrder(n, int(generator_of(seed, "mix", i).integers(2**62)), shuffle) for i, n in enumerate(sizes)
        ]

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The samples at positions [start, stop) of the epoch, counted over all data sets."""
        places = self._places.indices(epoch, start, stop)
        order = np.empty_like(places)
        of = np.searchsorted(self._ends, places, side="right")
        for i in np.unique(of):
            of_set = of == i
            nth = places[of_set] - (self._ends[i] - self._taken[i]) + epoch * self._taken[i]
            passes, offset = np.divmod(nth, self._sizes[i])
            samples = np.empty_like(nth)
            for number in np.unique(passes):
                in_pass = passes == number
                samples[in_pass] = self._within[i].at(int(number), offset[in_pass])
            order[of_set] = samples + int(self._sizes[:i].sum())
        return order


class WindowOrder:
    """An order for rows that are read piece by piece: a new order of the pieces, and of the rows within a few of them.

    In each epoch the pieces are permuted; every `WINDOW` of them in that order form a window, whose rows are permuted.
    So a reader holds `WINDOW` pieces at a time, and the order is a function of (seed, epoch, window) alone. Unshuffled,
    rows follow one another.

    `sizes`: rows of each piece; the rows of all pieces are counted through. `goes_on`: which pieces stay behind the
    piece before them; None = no piece.
    """

    WINDOW = 4

    def __init__(
        self, sizes: npt.NDArray[np.int64], seed: int, shuffle: bool, goes_on: npt.NDArray[np.bool_] | None = None
    ) -> None:
        self.n = int(sizes.sum())
        self.seed, self.shuffle = seed, shuffle
        self._sizes = sizes
        self._first_rows = np.cumsum(sizes) - sizes
        self._heads = np.arange(len(sizes)) if goes_on is None else np.flatnonzero(~goes_on)
        self._epoch = -1

    def _begin(self, epoch: int) -> None:
        """Lay out an epoch: its pieces in order, and where its windows end."""
        if epoch == self._epoch:
            return
        order = EpochOrder(len(self._heads), self.seed, self.shuffle)
        chains = np.split(np.arange(len(self._sizes)), self._heads[1:])
        self._pieces = np.concatenate([chains[i] for i in order.indices(epoch, 0, len(self._heads))])
        self._stops = np.cumsum(self._sizes[self._pieces])
        self._windows = np.append(self._stops[self.WINDOW - 1 : -1 : self.WINDOW], self.n)
        self._epoch = epoch

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The rows at positions [start, stop) of the epoch."""
        self._begin(epoch)
        places = np.arange(start, stop, dtype=np.int64)
        of = np.searchsorted(self._windows, places, side="right")
        for window in np.unique(of):
            in_window = of == window
            begin = int(self._windows[window - 1]) if window else 0
            size = int(self._windows[window]) - begin
            within = EpochOrder(size, int(generator_of(self.seed, "window", int(window)).integers(2**62)), self.shuffle)
            places[in_window] = begin + within.at(epoch, places[in_window] - begin)
        piece = np.searchsorted(self._stops, places, side="right")
        rows: npt.NDArray[np.int64] = (
            places - (self._stops[piece] - self._sizes[self._pieces[piece]]) + self._first_rows[self._pieces[piece]]
        )
        return rows


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> _WORD(30))) * _WORD(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _WORD(27))) * _WORD(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> _WORD(31))
    return mixed


@dataclass(frozen=True)
class State:
    """A run's position in its data; it means the same at any world size, micro-batch size and accumulation."""

    epoch: int = 0
    next_sample: int = 0


@dataclass
class BatchSchedule:
    """The samples that this rank takes in each micro-batch of each optimizer step.

    A global batch is the next `global_batch` positions of the epoch's order; it never spans two epochs. Its samples are
    spread evenly over the accum × world micro-batches, and every rank runs `accum` of them; in an epoch's smaller last
    batch some are smaller and some may be empty.
    """

    n_samples: int
    global_batch: int
    micro_batch: int
    accum: int
    rank: int
    world: int
    seed: int
    shuffle: bool
    drop_last: bool
    order: Order | None = None  # of `n_samples` positions; None = `EpochOrder`

    def __post_init__(self) -> None:
        product = f"{self.micro_batch} × {self.accum} × {self.world} (micro × accum × world)"
        if self.global_batch != self.micro_batch * self.accum * self.world:
            raise ValueError(f"global_batch={self.global_batch} is not {product}")
        if self.drop_last and self.n_samples < self.global_batch:
            raise ValueError(f"drop_last leaves no step: {self.n_samples} samples, global batch {self.global_batch}")
        self._order: Order = self.order or EpochOrder(self.n_samples, self.seed, self.shuffle)

    @property
    def steps_per_epoch(self) -> int:
        if self.drop_last:
            return self.n_samples // self.global_batch
        return -(-self.n_samples // self.global_batch)

    def micro_batches(self, state: State) -> tuple[list[list[int]], State]:
        """Sample indices of this rank's `accum` micro-batches for the step that starts at `state`; the next state."""
        state = self._normalised(state)
        size = min(self.global_batch, self.n_samples - state.next_sample)
        samples = self._order.indices(state.epoch, state.next_sample, state.next_sample + size).tolist()
        parts = [spread(size, self.accum * self.world, a * self.world + self.rank) for a in range(self.accum)]
        after = self._normalised(State(state.epoch, state.next_sample + size))
        return [samples[part] for part in parts], after

    def _normalised(self, state: State) -> State:
        """`state`, or the next epoch's start when this epoch has no batch left."""
        n_remaining = self.n_samples - state.next_sample
        if n_remaining <= 0 or (self.drop_last and n_remaining < self.global_batch):
            return State(state.epoch + 1, 0)
        return state


def spread(n: int, parts: int, part: int) -> slice:
    """The range of n samples that falls to one of `parts` even parts (sizes differ by at most one)."""
    return slice(part * n // parts, (part + 1) * n // parts)


Batch = Any
Collate = Callable[[list[Any]], Batch]


class MapDataset(Sized, Protocol):
    """`len()` and integer indexing."""

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank."""

    # (batch, is_filler) pairs, the same number on every rank; a filler keeps a rank in step when it has no samples
    # left: it goes through forward and backward with weight 0 and its targets do not count
    micro_batches: list[tuple[Batch, bool]]
    state_after: State  # where to continue once the step is done


class StepLoader:
    """Iterates over `n_steps` optimizer steps from `state` on, epoch after epoch.

    `filler`: changes the micro-batch that a rank gets which has no samples left.

    With `workers` > 0, that many processes load ahead, `prefetch` micro-batches each; they live until `close`, across
    epochs. With 0, samples are loaded on demand. The samples are the same either way.
    """

    def __init__(
        self,
        dataset: MapDataset,
        schedule: BatchSchedule,
        collate: Collate | None = None,
        *,
        state: State = State(),
        n_steps: int,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        filler: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._schedule, self._filler = schedule, filler
        self._state = state
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
        with fork_without_garbage():
            self._batches: Iterator[Batch] | None = iter(loader)

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> StepBatch:
        if self._batches is None:
            raise RuntimeError("StepLoader is closed")
        if self._steps_left == 0:
            raise StopIteration
        parts, after = self._schedule.micro_batches(self._state)
        batches = [_checked(next(self._batches)) for _ in parts]
        micro_batches = [
            (batch, False) if part else (self._filler(batch), True) for batch, part in zip(batches, parts, strict=True)
        ]
        step = StepBatch(micro_batches, after)
        self._state = after
        self._steps_left -= 1
        return step

    def close(self) -> None:
        """End the workers. May be called twice."""
        # Dropping the last reference to DataLoader's iterator is its public way to join the worker processes.
        self._batches = None


def _micro_batches(schedule: BatchSchedule, state: State, n_steps: int) -> Iterator[list[int]]:
    """The schedule's micro-batches in order, with the first sample in place of an empty one."""
    for _ in range(n_steps):
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
    turn; a rank without one in the last round gets the first sample as a filler. `limit`: samples over all ranks;
    evenly spaced ones represent a larger dataset.
    """
    together = collate or default_collate
    n = len(dataset)
    n_used = n if limit is None else min(n, limit)
    for round_start in range(0, n_used, micro_batch * world):
        start = round_start + rank * micro_batch
        indices = [position * n // n_used for position in range(start, min(start + micro_batch, n_used))]
        yield together([dataset[i] for i in indices or [0]]), not indices
