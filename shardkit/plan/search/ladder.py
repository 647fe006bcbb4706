"""What fits: techniques added one by one to the same model, and the largest model, each predicted and then tried."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

from ...config.schema import ModelConfig, RunConfig
from ...errors import ConfigError, ShardkitError, gib
from ..client import Planner
from ..model.estimate import DoesNotFit, MemoryEstimate
from ..show import misfit
from ..target import Target
from .trial import Trial, writing

Load = Callable[[Sequence[str]], RunConfig]
"""Returns the config with more overrides."""
Try = Callable[[Sequence[str], int], Trial]
"""Runs the config with these overrides, as the n-th attempt."""
_VOCABULARIES = ("causal_lm", "hf_causal_lm", "hf_masked_lm")
"""Built-in tasks whose loss is a cross-entropy over a vocabulary."""
_SAME_LOSS = 2e-2  # bf16 rounds: a wrong gradient scale or a lost technique is further off


@dataclass(frozen=True)
class Rung:
    """A technique, and the settings it adds to the rungs below."""

    name: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """A rung on top of all rungs below it: its prediction and its trial."""

    rung: Rung
    settings: tuple[str, ...]
    predicted: int | None  # bytes on the device; `None` if the rung cannot be planned, with the reason in `refused`
    verdict: str | None
    refused: str = ""
    trial: Trial | None = None  # `None` if it was not tried
    same_loss: bool | None = None  # whether its losses agree with those of the first rung that ran, within 2 %


def default_rungs(world_size: int, config: RunConfig | None = None) -> list[Rung]:
    """The classic experiment: plain fp32 without `config`'s own techniques, then one technique after another on top."""
    plain = "single" if world_size == 1 else "ddp"
    base = [f"parallel.strategy={plain}", "precision.mode=fp32", "activation.policy=none"]
    chunks = []
    if config is None or (config.task.factory is None and config.task.name in _VOCABULARIES):
        base.append("model.loss_chunk_size=0")
        chunks.append(Rung("+ chunked cross-entropy", ("model.loss_chunk_size=1024",)))
    return [
        Rung("fp32", (*([] if config is None else _without_techniques(config)), *base)),
        Rung("+ checkpointing", ("activation.policy=full",)),
        Rung("+ bf16", ("precision.mode=bf16",)),
        *chunks,
        Rung("+ ZeRO-2", ("parallel.strategy=zero2",)),
        Rung(
            "+ ZeRO-3, CPU offload",
            ("parallel.strategy=zero3", "parallel.offload_optimizer=cpu", "parallel.offload_param=cpu"),
        ),
    ]


def _without_techniques(config: RunConfig) -> Iterator[str]:
    """The overrides that reset the sections which the rungs change to their defaults, and a base in 4 bits."""
    if config.model.quantize is not None:
        yield "model.quantize=null"
    for name in ("parallel", "precision", "activation"):
        section = getattr(config, name)
        defaults = type(section)()
        for key in type(section).model_fields:
            if getattr(section, key) != getattr(defaults, key):
                yield f"{name}.{key}={json.dumps(getattr(defaults, key))}"


def parse_rung(text: str) -> Rung:
    name, sign, settings = text.partition(":")
    items = settings.split()
    if not sign or not name.strip() or not items or not all("=" in item for item in items):
        raise ConfigError(f"--rung {text!r} is not a rung", "write NAME: key=value key=value")
    return Rung(name.strip(), tuple(items))


def climb(load: Load, rungs: Sequence[Rung], target: Target, try_it: Try | None) -> Iterator[Step]:
    """Predict, and try, each rung on top of those below it; one that cannot be planned is tried: it may still train."""
    stacked = list(_stacked(rungs, load))
    reference: tuple[float, ...] = ()
    with Planner(target) as planner:
        for position, (rung, overrides) in enumerate(stacked):
            estimate, refused = None, ""
            try:
                estimate = planner.predict(load(overrides))
            except ShardkitError as error:
                refused = error.cause
            trial = None if try_it is None else try_it(overrides, position)
            is_same = None
            if trial is not None and trial.losses:
                reference = reference or trial.losses
                pairs = zip(trial.losses, reference, strict=True)
                is_same = all(abs(loss - expected) <= _SAME_LOSS * abs(expected) for loss, expected in pairs)
            yield Step(
                rung, overrides, estimate.needed if estimate else None, estimate.verdict if estimate else None,
                refused, trial, is_same,
            )  # fmt: skip


def _stacked(rungs: Sequence[Rung], load: Load) -> Iterator[tuple[Rung, tuple[str, ...]]]:
    settings: dict[str, str] = {}
    names: set[str] = set()
    for rung in rungs:
        if rung.name in names:
            raise ConfigError(f"two rungs are called {rung.name!r}", "give each --rung its own name")
        names.add(rung.name)
        settings |= dict(item.split("=", 1) for item in rung.settings)
        overrides = tuple(f"{key}={value}" for key, value in settings.items())
        try:
            load(overrides)
        except ConfigError as error:
            raise ConfigError(f"rung {rung.name!r}: {error.cause}", error.fix) from error
        yield rung, overrides


HEAD = ("rung", "predicted", "measured", "reserved", "tokens/s", "loss", "")


def cells(step: Step) -> list[str]:
    """A row of the table, with the columns of `HEAD`."""
    trial = step.trial
    measured, reserved, speed, loss, outcome = "–", "–", "–", "–", step.verdict or step.refused
    if trial is not None:
        outcome = "fits" if trial.outcome == "ok" else trial.outcome
        if trial.outcome == "failed":
            outcome += f": {trial.message}"
        measured = "–" if trial.peak is None else gib(trial.peak)
        reserved = "–" if trial.reserved is None else gib(trial.reserved)
        speed = "–" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}"
        if trial.losses:
            loss = f"{trial.losses[-1]:.4f}" + ("" if step.same_loss else " (differs)")
    predicted = "–" if step.predicted is None else gib(step.predicted)
    return [step.rung.name, predicted, measured, reserved, speed, loss, outcome]


def table(steps: Sequence[Step]) -> str:
    rows: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD), *map(cells, steps)]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def save(steps: Sequence[Step], folder: Path, limit: int | None) -> Path:
    """Write `ladder.json` and `ladder.md` with `limit`, the bytes of a rank, if any; returns the path of the latter."""
    contents = {"schema": 1, "device_memory": limit, "rungs": [asdict(step) for step in steps]}
    path = folder / "ladder.md"
    with writing(folder):
        (folder / "ladder.json").write_text(json.dumps(contents, indent=1))
        path.write_text(table(steps) + "\n")
    return path


# Find the largest model, or the largest micro-batch, that trains: by prediction first, then by real steps.

FINEST = 1.02
"""Neighbouring sizes differ by at most this factor, if layers, widths and heads allow."""
_STEP = 0.004  # relative step of large widths and depths; squared for the width, it stays well below `FINEST`
_LARGEST_BATCH = 65536
_LONGEST = 2**22


@dataclass(frozen=True)
class Size:
    """A model, or a micro-batch, with the settings that make it."""

    settings: tuple[str, ...]
    amount: int  # number of parameters, or of samples


@dataclass(frozen=True)
class Boundary:
    """The largest size that works and the next size, which does not."""

    largest: Size
    next_up: Size
    predicted: int  # bytes on the device for the largest size
    limited_by: Literal["device", "host"] = "device"  # the memory that the next size lacks
    attempts: int = 0  # number of real runs


def model_sizes(model: ModelConfig, most: float, multiple: int = 1) -> list[Size]:
    """Reference transformers like `model` with other layers, width and heads, each at most 2 % larger than the last.

    The next size is the model within reach whose depth/width ratio and heads are nearest to the config's: its memory
    then grows with its size, as far as whole layers and heads allow. Heads stay multiples of 8 wide where that is
    possible and the config's are: torch may keep whole attention weights of others. If a large vocabulary dominates a
    small model, widening it by one can exceed 2 %. `most`: largest number of parameters. `multiple`: widths are
    multiples of this; fp8 needs 16.
    """
    candidates = sorted(_around(model, most, multiple), key=lambda candidate: candidate[:3])
    sizes: list[Size] = []
    at = 0
    while at < len(candidates):
        amount = sizes[-1].amount if sizes else candidates[0][0]
        reach = range(at, bisect_right(candidates, amount * FINEST, at, key=lambda candidate: candidate[0]))
        halfway = amount * (1 + FINEST) / 2
        chosen = min(reach or [at], key=lambda i: (candidates[i][1], candidates[i][0] <= halfway, candidates[i][2]))
        sizes.append(candidates[chosen][3])
        at = chosen + 1
    return sizes


def _around(model: ModelConfig, most: float, multiple: int) -> Iterator[tuple[int, bool, float, Size]]:
    """(parameters, whether its heads are less even than the config's, distance of its shape from the config's, model).

    Widths are multiples of the heads; half to twice as many heads fill the gaps between the widths of small models.
    """
    rows = model.vocab_size * (1 if model.tie_weights else 2) + model.max_seq_len
    seen_widths: set[int] = set()
    even = math.gcd(model.d_model // model.n_heads, 8)
    all_heads = range(-(-model.n_heads // 2), 2 * model.n_heads + 1)
    by_distance = sorted(all_heads, key=lambda heads: abs(math.log(heads / model.n_heads)))
    for factor, heads in product(dict.fromkeys((even, 1)), by_distance):
        is_configs_heads = heads == model.n_heads
        width = unit = math.lcm(heads * factor, multiple)
        while rows * width <= most and (is_configs_heads or width <= model.n_heads / _STEP):
            usual = width * model.n_layers / model.d_model
            spread = 4.0 if usual < 12 else 1.3  # few widths and depths are small
            depths = range(max(1, round(usual / spread)), max(2, round(usual * spread)) + 1, 1 + int(usual * _STEP))
            for layers in depths if width not in seen_widths else ():
                n_params = 12 * layers * width**2 + 13 * layers * width + (rows + 2) * width
                if n_params > most:
                    break
                head_settings = () if is_configs_heads else (f"model.n_heads={heads}",)
                size = Size((f"model.d_model={width}", f"model.n_layers={layers}", *head_settings), n_params)
                distance = abs(math.log(layers / usual)) + abs(math.log(heads / model.n_heads))
                yield n_params, width // heads % even > 0, distance, size
            seen_widths.add(width)
            width += unit * (1 + int(width * _STEP / unit))


def batch_sizes(accumulated: int | None = None) -> list[Size]:
    """Every micro-batch size up to 65536; a fixed `accumulated` replaces a global batch that only some divide."""
    step = () if accumulated is None else (f"train.grad_accum_steps={accumulated}", "train.global_batch_size=null")
    return [Size((f"train.micro_batch_size={n}", *step), n) for n in range(1, _LARGEST_BATCH + 1)]


def lengths(config: RunConfig) -> list[Size]:
    """Sequence lengths up to 4 Mi, each at most 2 % longer than the last as far as whole parts of 128 tokens allow."""
    unit = math.lcm(128, config.parallel.cp)
    positions = "model.max_seq_len" if config.task.name == "causal_lm" else "model.hf.max_position_embeddings"
    sizes, length = [], unit
    while length <= _LONGEST:
        sizes.append(Size((f"train.seq_len={length}", f"{positions}={length}"), length))
        length = max(length + unit, int(length * FINEST) // unit * unit)
    return sizes


def largest(load: Load, sizes: Sequence[Size], target: Target, try_it: Try | None, look_ahead: int = 0) -> Boundary:
    """Find the last size that fits and the first that does not.

    Bisects sizes by prediction; real runs then step from the predicted boundary, up while they work or down while they
    fail, until one size works and the next runs out of memory. `sizes`: smallest first. `try_it`: runs a size; `None`
    only predicts. `look_ahead`: how many sizes to predict beyond the first misfit, since memory does not always grow
    with size.
    """
    limit = target.device_memory
    if limit is None:
        raise ConfigError("there is no limit to find the largest size for", "pass --gpu, --gpu-memory or --memory-cap")
    with Planner(target) as planner:

        @cache
        def estimate(size: Size) -> MemoryEstimate:
            return planner.predict(load(size.settings))

        def fits(index: int) -> bool:
            return estimate(sizes[index]).verdict != "does not fit"

        if not fits(0):
            cause = f"not even {' '.join(sizes[0].settings)} fits: {misfit(estimate(sizes[0]))}"
            raise DoesNotFit(cause, "use a larger card, or a setting that needs less memory")
        low = _bisected(fits, len(sizes), sizes)
        # A deep model may not fit although a larger, shallower one does.
        while beyond := [i for i in range(low + 1, min(low + 1 + look_ahead, len(sizes) - 1)) if fits(i)]:
            low = beyond[-1]
        limited_by: Literal["device", "host"] = "host" if estimate(sizes[low + 1]).needed <= limit else "device"
        boundary = Boundary(sizes[low], sizes[low + 1], estimate(sizes[low]).needed, limited_by)
        if try_it is None:
            return boundary
        low, attempts = _confirmed(low, sizes, try_it)
        return Boundary(sizes[low], sizes[low + 1], estimate(sizes[low]).needed, limited_by, attempts)


def _bisected(fits: Callable[[int], bool], count: int, sizes: Sequence[Size]) -> int:
    """The last index that fits, found by doubling and then halving: large sizes are slow to predict."""
    low, step = 0, 1
    while low + step < count and fits(low + step):
        low += step
        step *= 2
    high = min(low + step, count - 1)
    if low == count - 1 or (high == count - 1 and fits(high)):
        raise ConfigError(f"even {' '.join(sizes[-1].settings)} fits", "the search ends at this size")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _confirmed(index: int, sizes: Sequence[Size], try_it: Try) -> tuple[int, int]:
    """Step from the predicted boundary until one size works and the next does not: (its index, number of runs)."""
    trials: dict[int, Trial] = {}

    def works(at: int) -> bool:
        if at not in trials:
            trials[at] = trial = try_it(sizes[at].settings, len(trials))
            if trial.outcome == "failed":
                cause = f"{' '.join(sizes[at].settings)} failed: {trial.message}"
                raise ShardkitError(cause, "look at its run directory")
        return trials[at].outcome == "ok"

    while not works(index):
        index -= 1
        if index < 0:
            raise ConfigError("not even the smallest size could be trained", "use a setting that needs less memory")
    while works(index + 1):
        index += 1
        if index + 2 == len(sizes):
            raise ConfigError(f"even {' '.join(sizes[-1].settings)} works", "the search ends at this size")
    return index, len(trials)
