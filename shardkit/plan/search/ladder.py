"""What fits: techniques added one by one to the same model, and the largest model, each predicted and then tried."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Literal

from ...config.load import as_override
from ...config.schema import ModelConfig, RunConfig
from ...errors import ConfigError, ShardkitError, gib
from ..client import Planner
from ..model.estimate import DoesNotFit, MemoryEstimate
from ..show import columns, misfit
from ..target import Target
from .search import AXES, axis_settings, group_sizes, layout, ranks_to_a_sample
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
_LONGEST = 2**24


@dataclass(frozen=True)
class Size:
    """A model, or a micro-batch, with the settings that make it."""

    settings: tuple[str, ...]
    amount: int  # number of parameters, or of samples over all ranks


@dataclass(frozen=True)
class Boundary:
    """The largest size that works and the next size, which does not."""

    largest: Size
    next_up: Size
    predicted: int  # bytes on the device for the largest size
    limited_by: Literal["device", "host"] = "device"  # the memory that the next size lacks
    attempts: int = 0  # number of real runs


@dataclass(frozen=True)
class Layout:
    """Groups of ranks along `AXES`, and the sizes to look at with them, the smallest first."""

    name: str
    groups: tuple[int, ...]
    sizes: Sequence[Size]


@dataclass(frozen=True)
class Beyond:
    """What a layout takes at its first size beyond the largest that fits with any layout."""

    layout: Layout
    size: Size | None
    estimate: MemoryEstimate | None  # timed; `None` if the layout cannot be planned
    refused: str = ""


def layouts_to_try(
    config: RunConfig, target: Target, fixed_keys: Collection[str], sizes: Callable[[int], Sequence[Size]]
) -> list[Layout]:
    """The config's own layout, then those that `--auto` would try. `sizes`: to look at where so many ranks share a
    sample."""
    present = tuple(int(getattr(config.parallel, key)) for key in AXES)
    layouts = []
    for groups in dict.fromkeys((present, *group_sizes(config, target, fixed_keys))):
        changes = tuple(
            f"{key}={value}"
            for key, value in axis_settings(groups).items()
            if value not in ("1", "false") or value != as_override(attrgetter(key)(config))
        )
        named = [Size((*size.settings, *changes), size.amount) for size in sizes(ranks_to_a_sample(groups))]
        layouts.append(Layout(layout(config.parallel.strategy, groups), groups, named))
    if not layouts[0].sizes:
        cause = f"{layouts[0].name}: no number of heads near model.n_heads={config.model.n_heads} can be shared so"
        raise ConfigError(cause, "set model.n_heads to a multiple of parallel.tp × parallel.cp")
    return layouts


def model_sizes(model: ModelConfig, most: float, multiple: int = 1, sharing: int = 1) -> list[Size]:
    """Reference transformers like `model` with other layers, width and heads, each at most 2 % larger than the last.

    The next size is the model within reach whose depth/width ratio and heads are nearest to the config's: its memory
    then grows with its size, as far as whole layers and heads allow. Heads stay multiples of 8 wide where that is
    possible and the config's are: torch may keep whole attention weights of others. If a large vocabulary dominates a
    small model, widening it by one can exceed 2 %. `most`: largest number of parameters. `multiple`: widths are
    multiples of this; fp8 needs 16. `sharing`: ranks that share heads, which are multiples of this.
    """
    candidates = sorted(_around(model, most, multiple, sharing), key=lambda candidate: candidate[:3])
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


def _around(model: ModelConfig, most: float, multiple: int, sharing: int) -> Iterator[tuple[int, bool, float, Size]]:
    """(parameters, whether its heads are less even than the config's, distance of its shape from the config's, model).

    Widths are multiples of the heads; half to twice as many heads fill the gaps between the widths of small models.
    """
    rows = model.vocab_size * (1 if model.tie_weights else 2) + model.max_seq_len
    seen_widths: set[int] = set()
    even = math.gcd(model.d_model // model.n_heads, 8)
    all_heads = (heads for heads in range(-(-model.n_heads // 2), 2 * model.n_heads + 1) if heads % sharing == 0)
    by_distance = sorted(all_heads, key=lambda heads: abs(math.log(heads / model.n_heads)))
    for factor, heads in product(dict.fromkeys((even, 1)), by_distance):
        is_nearest = heads == by_distance[0]
        width = unit = math.lcm(heads * factor, multiple)
        while rows * width <= most and (is_nearest or width <= model.n_heads / _STEP):
            usual = width * model.n_layers / model.d_model
            spread = 4.0 if usual < 12 else 1.3  # few widths and depths are small
            depths = range(max(1, round(usual / spread)), max(2, round(usual * spread)) + 1, 1 + int(usual * _STEP))
            for layers in depths if width not in seen_widths else ():
                n_params = 12 * layers * width**2 + 13 * layers * width + (rows + 2) * width
                if n_params > most:
                    break
                head_settings = () if heads == model.n_heads else (f"model.n_heads={heads}",)
                size = Size((f"model.d_model={width}", f"model.n_layers={layers}", *head_settings), n_params)
                distance = abs(math.log(layers / usual)) + abs(math.log(heads / model.n_heads))
                yield n_params, width // heads % even > 0, distance, size
            seen_widths.add(width)
            width += unit * (1 + int(width * _STEP / unit))


def batch_sizes(accumulated: int | None = None, data_ranks: int = 1) -> list[Size]:
    """Every micro-batch size up to 65536; a fixed `accumulated` replaces a global batch that only some divide."""
    step = () if accumulated is None else (f"train.grad_accum_steps={accumulated}", "train.global_batch_size=null")
    return [Size((f"train.micro_batch_size={n}", *step), n * data_ranks) for n in range(1, _LARGEST_BATCH + 1)]


def lengths(config: RunConfig) -> list[Size]:
    """Sequence lengths up to 16 Mi, each at most 2 % longer than the last as far as whole parts of 128 tokens allow."""
    if config.task.factory is not None or not config.task.may_split_sequences:
        cause = f"--longest is for causal language models, but the task is {config.task.factory or config.task.name}"
        raise ConfigError(cause, "set task.name=causal_lm or hf_causal_lm, or plan lengths of your own one by one")
    unit = math.lcm(128, config.parallel.cp)
    positions = "model.max_seq_len" if config.task.name == "causal_lm" else "model.hf.max_position_embeddings"
    sizes, length = [], unit
    while length <= _LONGEST:
        sizes.append(Size((f"train.seq_len={length}", f"{positions}={length}"), length))
        length = max(length + unit, int(length * FINEST) // unit * unit)
    return sizes


def show_boundary(answer: Boundary, unit: str, memory: int) -> str:
    """The largest size that works, as text; `unit`: of its amount, `memory`: bytes of a rank's device."""
    size, next_up, attempts = answer.largest, answer.next_up, answer.attempts
    short = "; the next one is short of host memory" if answer.limited_by == "host" else ""
    how = f"confirmed by {attempts} real runs: the next size ran out of memory" if attempts else "predicted"
    return (
        f"largest   {size.amount:,} {unit}: {' '.join(size.settings)}\n"
        f"needs     {gib(answer.predicted)} of {gib(memory)} (predicted){short}\n"
        f"next      {next_up.amount:,} {unit} ({next_up.amount / size.amount - 1:+.1%}): {how}"
    )


def show_beyond(compared: Sequence[Beyond], unit: str) -> str:
    """A line for each layout: its first size that is too large, and what it takes there. Steps differ in samples, so
    that bytes are those of all ranks for a token."""
    rows: list[tuple[str, ...]] = [("does not fit", unit, "needs", "sent a token", "tokens/s")]
    for beyond in compared:
        if beyond.size is not None and beyond.estimate is not None and (time := beyond.estimate.time) is not None:
            sent = f"{time.sent * beyond.estimate.world_size / time.targets / 2**20:,.3f} MiB"
            amount, speed = f"{beyond.size.amount:,}", f"{time.tokens_per_s:,.0f}"
            rows.append((beyond.layout.name, amount, gib(beyond.estimate.needed), sent, speed))
    refused = {beyond.layout.groups: beyond for beyond in compared if beyond.refused}
    lines = [
        f"{beyond.layout.name}: {beyond.refused}"
        for groups, beyond in refused.items()
        # What is refused beside smaller groups that are refused too needs no line.
        if not any(all(a <= b for a, b in zip(less, groups, strict=True)) for less in refused.keys() - {groups})
    ]
    return "\n".join([*columns(rows), *lines])


def largest(load: Load, sizes: Sequence[Size], target: Target, try_it: Try | None, look_ahead: int = 0) -> Boundary:
    """Find the last size that fits and the first that does not.

    Predicts sizes; real runs then step from the predicted boundary, up while they work or down while they
    fail, until one size works and the next runs out of memory. `sizes`: smallest first. `try_it`: runs a size; `None`
    only predicts. `look_ahead`: how many sizes to predict beyond the first misfit, since memory does not always grow
    with size.
    """
    return largest_layout(load, [Layout("", (), sizes)], target, try_it, look_ahead)[0]


def largest_layout(
    load: Load, layouts: Sequence[Layout], target: Target, try_it: Try | None, look_ahead: int = 0
) -> tuple[Boundary, list[Beyond]]:
    """The same over layouts, the config's own first; also what each of them takes at its first size beyond the largest,
    which then fits with none."""
    limit = target.device_memory
    if limit is None:
        raise ConfigError("there is no limit to find the largest size for", "pass --gpu, --gpu-memory or --memory-cap")
    with Planner(target) as planner:

        @cache
        def estimate(size: Size) -> MemoryEstimate:
            config = load(size.settings)
            return planner.predict(config, timed=True) if len(layouts) > 1 else planner.predict(config)

        refused: dict[str, str] = {}

        def look(layout: Layout, reached: int) -> Beyond:
            size = next((size for size in layout.sizes if size.amount > reached), None)
            if size is None:
                refused[layout.name] = "no larger size can be shared so"
            if size is None or layout.name in refused:
                return Beyond(layout, None, None, refused[layout.name])
            try:
                return Beyond(layout, size, estimate(size))
            except ShardkitError as error:
                refused[layout.name] = error.cause
                return Beyond(layout, None, None, error.cause)

        sizes, low = layouts[0].sizes, -1
        if _fits(estimate(sizes[0])):
            low = _last_that_fits(estimate, sizes, limit, look_ahead)
        compared: list[Beyond] = []
        while len(layouts) > 1:
            compared = [look(layout, 0 if low < 0 else sizes[low].amount) for layout in layouts]
            able = [(b.estimate.needed, b.layout.sizes, b.size) for b in compared if b.estimate and _fits(b.estimate)]
            if not able:
                break
            _, sizes, size = min(able, key=itemgetter(0))
            low = sizes.index(size)
            low += _last_that_fits(estimate, sizes[low:], limit, look_ahead)
        if low < 0:
            cause = f"not even {' '.join(sizes[0].settings)} fits: {misfit(estimate(sizes[0]))}"
            raise DoesNotFit(cause, "use a larger card, or a setting that needs less memory")
        limited_by: Literal["device", "host"] = "host" if estimate(sizes[low + 1]).needed <= limit else "device"
        attempts = 0
        if try_it is not None:
            low, attempts = _confirmed(low, sizes, try_it)
        return Boundary(sizes[low], sizes[low + 1], estimate(sizes[low]).needed, limited_by, attempts), compared


def _fits(estimate: MemoryEstimate) -> bool:
    return estimate.verdict != "does not fit"


def _last_that_fits(
    estimate: Callable[[Size], MemoryEstimate], sizes: Sequence[Size], limit: int, look_ahead: int
) -> int:
    """Index of the last size that fits. The first one does.

    Memory is nearly a line in the size, so each guess lies on the line through the two latest predictions: 5 to 8 of
    them, each of which may take a minute, where halving takes 17. Every third guess halves what remains, for memory
    that is no such line, and for a host's.
    """
    low, high = 0, len(sizes)
    tried = [(sizes[0].amount, estimate(sizes[0]).needed)]
    guess = min(1 << 6, high - 1)
    while high - low > 1:
        predicted = estimate(sizes[guess])
        low, high = (guess, high) if _fits(predicted) else (low, guess)
        tried.append((sizes[guess].amount, predicted.needed))
        (amount, needed), (later_amount, later_needed) = tried[-2:]
        guess = (low + high) // 2
        if len(tried) % 3 and later_needed != needed:
            crossing = amount + (limit - needed) * (later_amount - amount) / (later_needed - needed)
            on_the_line = bisect_right(sizes, crossing, key=lambda size: size.amount) - 1
            guess = min(max(on_the_line, low + 1), high - 1)
    if high == len(sizes):
        raise ConfigError(f"even {' '.join(sizes[-1].settings)} fits", "the search ends at this size")
    # A deep model may not fit although a larger, shallower one does.
    while beyond := [i for i in range(low + 1, min(low + 1 + look_ahead, len(sizes) - 1)) if _fits(estimate(sizes[i]))]:
        low = beyond[-1]
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
