"""SwinIR's peak according to the ledger and to the allocator, under AMP and AMP with checkpointing.

The model is transformers' Swin2SR, as large as SwinIR; a step is traced tensor by tensor and its categories are summed.
Both settings train in turns, in fresh processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from .cases import Case, Cases, Found, Where
from .target import train, went

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


def measure(where: Where) -> Found:
    """`rounds`: for each arm its trials with the traced peak; ratios are of checkpointing to without."""
    base, rounds, steps = (DRY_BASE, DRY_ROUNDS, DRY_STEPS) if where.dry else (BASE, ROUNDS, STEPS)
    found: Found = {"arms": {arm: where.earlier.get("arms", {}).get(arm, []) for arm in ARMS}}
    for index in range(rounds):
        for arm in sorted(ARMS, reverse=index % 2 == 1):
            trials = found["arms"][arm]
            if len(trials) > index:
                continue
            name = f"{index}-{list(ARMS).index(arm)}"
            trial = train(where, [*base, *ARMS[arm]], steps=steps, name=name)
            if trial.outcome != "ok":
                return {**found, "outcome": trial.outcome, "message": f"{arm}: {trial.message}"}
            trials.append({**went(trial), "traced": traced_peak(where.folder / name)})
            where.keep(found)
    return {**found, "outcome": "ok", **ratios(found["arms"]["AMP"], found["arms"]["AMP + checkpointing"])}


def traced_peak(run: Path) -> Found:
    """Bytes, phase and categories of the traced step's peak; `unattributed` is the allocator's rest."""
    peak: Found = json.loads((run / "trace" / "rank0.json").read_text())["peak"]
    return peak


def ratios(plain: list[Found], checkpointed: list[Found]) -> Found:
    """Memory and time with checkpointing over those without; times round by round."""
    times = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(plain, checkpointed, strict=True)]
    return {
        "memory_ratio": median(t["peak"] for t in checkpointed) / median(t["peak"] for t in plain),
        "time_ratios": times,
    }
