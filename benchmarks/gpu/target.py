"""The target that the parts plan for, and a few steps of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from .cases import Found, Where

if TYPE_CHECKING:
    from shardkit.config.schema import RunConfig
    from shardkit.plan.model.estimate import MemoryEstimate
    from shardkit.plan.search.trial import Trial
    from shardkit.plan.target import Target


def target(where: Where, cap: str | None = None) -> Target:
    """The card, or a smaller one emulated by `memory.cap`: the cap counts memory that torch reserves, nothing else.

    A dry run uses CPUs, where the cap counts tensors.
    """
    from shardkit.errors import parse_bytes
    from shardkit.hardware.cards import GPUS
    from shardkit.plan.target import Target

    limit = None if cap is None else parse_bytes(cap)
    if where.dry:
        return Target(1, None, 1, host_memory=where.host_memory, cap=limit)
    card = GPUS[where.card]
    if limit is not None:
        card = replace(card, memory=limit, context=0, per_communicator=0)
    return Target(1, card, 1, host_memory=where.host_memory)


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
    where: Where, overrides: Sequence[str], cap: str | None = None, steps: int = 4, name: str = "run", ranks: int = 1
) -> Trial:
    """Train a few steps in processes of their own, in `folder/NAME`; an emulated card has no speed."""
    from shardkit.plan.search.trial import run_trial

    trial = run_trial(None, settings(where, overrides), ranks, where.folder / name, steps, cap)
    return replace(trial, tokens_per_s=None) if where.emulated else trial


def predicted(estimate: MemoryEstimate) -> Found:
    """The figures of an estimate to compare with measurements, in bytes."""
    peak = estimate.peak
    return {
        "outcome": "ok", "n_params": estimate.n_params, "allocated": peak.allocated, "reserved": peak.reserved,
        "required": peak.required, "overhead": estimate.overhead, "host": estimate.host_peak,
        "verdict": estimate.verdict,
    }  # fmt: skip


def went(trial: Trial) -> Found:
    """A trial in JSON's types."""
    return {**asdict(trial), "losses": list(trial.losses)}


def next_size(trials: Found, start: int, stride: int) -> int | None:
    """The size to try next: up from `start` while sizes work, else down; `None` once one works and its neighbour fails.

    Args:
        trials: size as text → its result.
    """
    size = start
    while str(size) in trials:
        works = trials[str(size)]["outcome"] == "ok"
        following = size + (stride if works else -stride)
        if str(following) in trials and (trials[str(following)]["outcome"] == "ok") is not works:
            return None
        size = following
    return size
