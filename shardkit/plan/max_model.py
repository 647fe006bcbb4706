"""The largest model, or the largest micro-batch, that can be trained: by prediction first, then by real steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import ModelConfig
from ..errors import ConfigError, ShardkitError
from .client import Planner
from .ladder import Load, Try
from .target import Target
from .trial import Trial

FINEST = 1.02
"""Neighbouring sizes differ by no more, where layers and widths allow."""
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
        below, above: how they went; `None` if they were only predicted.
        attempts: real runs that were made.
    """

    largest: Size
    next_up: Size
    predicted: int
    below: Trial | None = None
    above: Trial | None = None
    attempts: int = 0


def model_sizes(model: ModelConfig, most: float) -> list[Size]:
    """Reference transformers around the given one, by layers and width, each at most 2 % larger than the one before.

    Widths are multiples of the number of heads; depth and width grow together, as in published families of models.

    Args:
        most: parameters beyond which no size is made.
    """
    found: dict[int, Size] = {}
    heads = model.n_heads
    width = heads
    while True:
        fixed = (2 * model.vocab_size + model.max_seq_len) * width
        if fixed > most:
            break
        # Around the ratio of depth to width that the config has; few widths and depths are small, so they go further.
        usual = width * model.n_layers / model.d_model
        spread = 4.0 if usual < 12 else 1.3
        for layers in range(max(1, round(usual / spread)), max(2, round(usual * spread)) + 1):
            n_params = 12 * layers * width**2 + 13 * layers * width + fixed
            if n_params <= most:
                found.setdefault(n_params, Size((f"model.d_model={width}", f"model.n_layers={layers}"), n_params))
        width += heads
    thinned: list[Size] = []
    ordered = [found[n_params] for n_params in sorted(found)]
    for index, size in enumerate(ordered):
        following = ordered[index + 1].amount if index + 1 < len(ordered) else size.amount
        if not thinned or following > thinned[-1].amount * FINEST or index + 1 == len(ordered):
            thinned.append(size)
    return thinned


def batch_sizes() -> list[Size]:
    return [Size((f"train.micro_batch_size={n}",), n) for n in range(1, _LARGEST_BATCH + 1)]


def largest(load: Load, sizes: Sequence[Size], target: Target, try_it: Try | None) -> Boundary:
    """The last size that fits, and the first that does not.

    Sizes are bisected by prediction; real runs then step from the predicted boundary, up while they work or down while
    they do not, until one works and its neighbour runs out of memory.

    Args:
        sizes: smallest first.
        try_it: runs a size; `None` only predicts.

    Raises:
        ConfigError: there is no limit, not even the smallest fits, or even the largest does; or a run fails for another
            reason than memory.
    """
    limit = target.device_memory
    if limit is None:
        raise ConfigError("there is no limit to find the largest size for", "pass --gpu, --gpu-memory or --memory-cap")
    with Planner(target) as planner:
        needs = _Needs(planner, load)
        low = _bisected(lambda index: needs.of(sizes[index]) <= limit, len(sizes), sizes)
        boundary = Boundary(sizes[low], sizes[low + 1], needs.of(sizes[low]))
        return boundary if try_it is None else _confirmed(boundary, low, sizes, needs, try_it)


class _Needs:
    """Predicted bytes of sizes, each asked for once."""

    def __init__(self, planner: Planner, load: Load) -> None:
        self._planner, self._load = planner, load
        self._known: dict[Size, int] = {}

    def of(self, size: Size) -> int:
        if size not in self._known:
            self._known[size] = self._planner.predict(self._load(size.settings)).needed
        return self._known[size]


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
    return Boundary(
        sizes[index], sizes[index + 1], needs.of(sizes[index]), trials[index], trials[index + 1], len(trials)
    )
