"""SwinIR's peak according to the ledger and to the allocator, under AMP and AMP with checkpointing.

The model is transformers' Swin2SR, as large as SwinIR; a step is traced tensor by tensor and its categories are summed.
Both settings train in turns, in fresh processes.
"""

from __future__ import annotations

from statistics import median

from ..common import rotated
from .cases import Case, Cases, Figures, Where
from .target import train, went_traced

BASE = ["task.name=super_resolution", "model.preset=swin2sr", "train.micro_batch_size=8", "precision.mode=bf16"]
DRY_BASE = [
    "task.name=super_resolution", "model.preset=swin2sr-debug", "train.micro_batch_size=2", "data.crop_size=32",
    "precision.mode=bf16",
]  # fmt: skip
ARMS = {"AMP": ["activation.policy=none"], "AMP + checkpointing": ["activation.policy=full"]}
ROUNDS, STEPS = 6, 14
DRY_ROUNDS, DRY_STEPS = 1, 4


def cases(dry: bool) -> Cases:
    return {"SwinIR": Case(measure)}


def measure(where: Where) -> Figures:
    """`rounds`: for each arm its trials with the traced peak; ratios are of checkpointing to without."""
    base, rounds, steps = (DRY_BASE, DRY_ROUNDS, DRY_STEPS) if where.dry else (BASE, ROUNDS, STEPS)
    if where.emulated:  # more rounds and steps are for speeds
        rounds, steps = DRY_ROUNDS, DRY_STEPS
    figures: Figures = {"arms": {arm: where.earlier.get("arms", {}).get(arm, []) for arm in ARMS}}
    for index in range(rounds):
        for arm in rotated(list(ARMS), index):
            trials = figures["arms"][arm]
            if len(trials) > index:
                continue
            name = f"{index}-{list(ARMS).index(arm)}"
            trial = train(where, [*base, *ARMS[arm]], steps=steps, name=name)
            if trial.outcome != "ok":
                return {**figures, "outcome": trial.outcome, "message": f"{arm}: {trial.message}"}
            trials.append(went_traced(trial, where.folder / name))
            where.keep(figures)
    return {**figures, "outcome": "ok", **ratios(figures["arms"]["AMP"], figures["arms"]["AMP + checkpointing"])}


def ratios(plain: list[Figures], checkpointed: list[Figures]) -> Figures:
    """Memory and time with checkpointing over those without; times round by round, none on emulated cards."""
    speeds = [
        (ours.get("tokens_per_s"), other.get("tokens_per_s")) for ours, other in zip(plain, checkpointed, strict=True)
    ]
    times = [ours / other for ours, other in speeds if ours is not None and other is not None]
    return {
        "memory_ratio": median(t["peak"] for t in checkpointed) / median(t["peak"] for t in plain),
        "time_ratios": times,
    }
