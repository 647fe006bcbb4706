"""The ladder: techniques added one by one to the same model, each rung predicted and then tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...config.schema import RunConfig
from ...errors import ConfigError, ShardkitError, gib
from ..client import Planner
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
