"""The largest model, or the largest micro-batch, that can be trained: by prediction first, then by real steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..config import ModelConfig
from ..errors import ConfigError, ShardkitError
from .client import Planner
from .estimate import MemoryEstimate
from .ladder import Load, Try
from .target import Target
from .trial import Trial

FINEST = 1.02
"""Neighbouring sizes differ by no more, where layers and widths allow."""
_STEP = 0.004  # of widths and depths, where they are large: with the square of the width well below `FINEST`
_LARGEST_BATCH = 65536


@dataclass(frozen=True)
class Size:
    """A model, or a micro-batch, by what is set for it.

    Attributes:
        amount: parameters, or samples.
    """

    settings: tuple[str, ...]
    amount: int


@dataclass(frozen=True)
class Boundary:
    """The largest size that works and the next one, which does not.

    Attributes:
        predicted: bytes of the largest on the device.
        limited_by: the memory that the next size has too little of; the host's is looked at if the target has a limit.
        below, above: how they went; `None` if they were only predicted.
        attempts: real runs that were made.
    """

    largest: Size
    next_up: Size
    predicted: int
    limited_by: Literal["device", "host"] = "device"
    below: Trial | None = None
    above: Trial | None = None
    attempts: int = 0


def model_sizes(model: ModelConfig, most: float) -> list[Size]:
    """Reference transformers around the given one, by layers and width, each at most 2 % larger than the one before.

    Widths are multiples of the number of heads. Of the models in reach the next is the one whose depth to width is
    nearest to the config's, so that what they need grows with their size, as far as whole layers and heads allow.

    Args:
        most: parameters beyond which no size is made.
    """
    found: list[tuple[int, float, Size]] = []
    heads = model.n_heads
    width = heads
    while True:
        fixed = (2 * model.vocab_size + model.max_seq_len) * width
        if fixed > most:
            break
        usual = width * model.n_layers / model.d_model
        spread = 4.0 if usual < 12 else 1.3  # few widths and depths are small
        for layers in range(max(1, round(usual / spread)), max(2, round(usual * spread)) + 1, 1 + int(usual * _STEP)):
            n_params = 12 * layers * width**2 + 13 * layers * width + fixed
            size = Size((f"model.d_model={width}", f"model.n_layers={layers}"), n_params)
            if n_params <= most:
                found.append((n_params, abs(math.log(layers / usual)), size))
        width += heads * (1 + int(width * _STEP / heads))
    found.sort(key=lambda one: one[:2])
    kept: list[Size] = []
    at = 0
    while at < len(found):
        last = kept[-1].amount if kept else found[0][0]
        reach = range(at, bisect_right(found, last * FINEST, at, key=lambda one: one[0]))
        far = [i for i in reach if found[i][0] > last * (1 + FINEST) / 2] or reach or [at]
        chosen = min(far, key=lambda i: found[i][1])
        kept.append(found[chosen][2])
        at = chosen + 1
    return kept


def batch_sizes() -> list[Size]:
    return [Size((f"train.micro_batch_size={n}",), n) for n in range(1, _LARGEST_BATCH + 1)]


def largest(load: Load, sizes: Sequence[Size], target: Target, try_it: Try | None, look_ahead: int = 0) -> Boundary:
    """The last size that fits, and the first that does not.

    Sizes are bisected by prediction; real runs then step from the predicted boundary, up while they work or down while
    they do not, until one works and its neighbour runs out of memory.

    Args:
        sizes: smallest first.
        try_it: runs a size; `None` only predicts.
        look_ahead: sizes beyond the first that does not fit that are looked at too, where need does not always grow.

    Raises:
        ConfigError: there is no limit, not even the smallest fits, or even the largest does; or a run fails for another
            reason than memory.
    """
    limit = target.device_memory
    if limit is None:
        raise ConfigError("there is no limit to find the largest size for", "pass --gpu, --gpu-memory or --memory-cap")
    with Planner(target) as planner:
        needs = _Needs(planner, load)

        def fits(index: int) -> bool:
            return needs.estimate(sizes[index]).verdict != "does not fit"

        low = _bisected(fits, len(sizes), sizes)
        # A size that does not fit can be a deep one: a larger one may.
        while beyond := [i for i in range(low + 1, min(low + 1 + look_ahead, len(sizes) - 1)) if fits(i)]:
            low = beyond[-1]
        limited_by: Literal["device", "host"] = "host" if needs.of(sizes[low + 1]) <= limit else "device"
        boundary = Boundary(sizes[low], sizes[low + 1], needs.of(sizes[low]), limited_by)
        return boundary if try_it is None else _confirmed(boundary, low, sizes, needs, try_it)


class _Needs:
    """Estimates of sizes, each asked for once."""

    def __init__(self, planner: Planner, load: Load) -> None:
        self._planner, self._load = planner, load
        self._known: dict[Size, MemoryEstimate] = {}

    def estimate(self, size: Size) -> MemoryEstimate:
        if size not in self._known:
            self._known[size] = self._planner.predict(self._load(size.settings))
        return self._known[size]

    def of(self, size: Size) -> int:
        """Bytes on the device."""
        return self.estimate(size).needed


def _bisected(fits: Callable[[int], bool], count: int, sizes: Sequence[Size]) -> int:
    """The last index that fits, found by doubling and then halving: large sizes are costly to ask for."""
    if count < 2 or not fits(0):
        raise ConfigError(
            f"not even {' '.join(sizes[0].settings)} fits", "use a larger or another card, or a setting that needs less"
        )
    low, step = 0, 1
    while low + step < count and fits(low + step):
        low += step
        step *= 2
    high = min(low + step, count - 1)
    if low == count - 1 or (high == count - 1 and fits(high)):
        raise ConfigError(f"even {' '.join(sizes[-1].settings)} fits", "this is as large as it is looked for")
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _confirmed(boundary: Boundary, index: int, sizes: Sequence[Size], needs: _Needs, try_it: Try) -> Boundary:
    """Step from the predicted boundary until one size works and the next does not."""
    trials: dict[int, Trial] = {}

    def works(at: int) -> bool:
        if at not in trials:
            trials[at] = trial = try_it(sizes[at].settings, len(trials))
            if trial.outcome == "failed":
                raise ShardkitError(
                    f"{' '.join(sizes[at].settings)} failed: {trial.message}", "look at its run directory"
                )
        return trials[at].outcome == "ok"

    while not works(index):
        index -= 1
        if index < 0:
            raise ConfigError("not even the smallest size could be trained", "use a setting that needs less")
    while works(index + 1):
        index += 1
        if index + 2 == len(sizes):
            raise ConfigError(f"even {' '.join(sizes[-1].settings)} works", "this is as large as it is looked for")
    return replace(
        boundary, largest=sizes[index], next_up=sizes[index + 1], predicted=needs.of(sizes[index]), below=trials[index],
        above=trials[index + 1], attempts=len(trials),
    )  # fmt: skip
