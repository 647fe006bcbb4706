"""The target that the parts plan for, and a few steps of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardkit.hardware.cards import GPUS

from .cases import Figures, Where

if TYPE_CHECKING:
    from shardkit.config.schema import RunConfig
    from shardkit.plan.model.estimate import MemoryEstimate
    from shardkit.plan.search.trial import Trial
    from shardkit.plan.target import Target


def target(where: Where) -> Target:
    from shardkit.plan.target import Target

    return Target(1, None if where.dry else GPUS[where.card], 1, host_memory=where.host_memory)


def settings(where: Where, *more: Sequence[str]) -> list[str]:
    """Overrides of a run here; later ones win."""
    device = ["run.device=cpu"] if where.dry else []
    chosen = dict(item.split("=", 1) for group in (device, *more) for item in group)
    return [f"{key}={value}" for key, value in chosen.items()]


def load(where: Where, *base: Sequence[str]) -> Callable[[Sequence[str]], RunConfig]:
    """Returns the config with further overrides."""
    from shardkit.config.load import load_config

    return lambda more: load_config(None, settings(where, *base, more)).config


def train(
    where: Where, overrides: Sequence[str], cap: str | None = None, steps: int = 4, name: str = "run"
) -> Trial:  # fmt: skip
    """Train a few steps in processes of their own, in `folder/NAME`."""
    from shardkit.plan.search.trial import run_trial

    return run_trial(None, settings(where, overrides), 1, where.folder / name, steps, cap)


def planned(config: RunConfig, to: Target) -> MemoryEstimate:
    """The planner's estimate of a config's memory."""
    from shardkit.plan.client import plan

    return plan(config, to)


def predicted(estimate: MemoryEstimate) -> Figures:
    """The figures of an estimate to compare with measurements, in bytes."""
    peak = estimate.peak
    return {
        "outcome": "ok", "n_params": estimate.n_params, "allocated": peak.allocated, "reserved": peak.reserved,
        "required": peak.required, "overhead": estimate.overhead, "host": estimate.host_peak,
        "verdict": estimate.verdict,
    }  # fmt: skip


def went(trial: Trial) -> Figures:
    """A trial in JSON's types."""
    return {**asdict(trial), "losses": list(trial.losses)}
