"""The target that the parts plan for, and a few steps of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.hardware.cards import GPUS

from .cases import Figures, Where
from .child import emulated_card

if TYPE_CHECKING:
    from shardkit.config.schema import RunConfig
    from shardkit.plan.model.estimate import MemoryEstimate
    from shardkit.plan.search.trial import Trial
    from shardkit.plan.target import Target


def target(where: Where, cap: str | None = None) -> Target:
    """The card, or a smaller one emulated by `memory.cap`: the cap counts memory that torch reserves, nothing else.

    On CPUs the cap counts tensors.
    """
    from shardkit.errors import parse_bytes
    from shardkit.plan.target import Target

    limit = None if cap is None else parse_bytes(cap)
    if where.on_cpu:
        return Target(1, None, 1, host_memory=where.host_memory, cap=limit)
    card = GPUS[where.card]
    if limit is not None:
        card = replace(card, memory=limit, context=0, per_communicator=0)
    return Target(1, card, 1, host_memory=where.host_memory)


def settings(where: Where, *more: Sequence[str]) -> list[str]:
    """Overrides of a run here; later ones win."""
    device = ["run.device=cpu"] if where.on_cpu else []
    chosen = dict(item.split("=", 1) for group in (device, *more) for item in group)
    return [f"{key}={value}" for key, value in chosen.items()]


def load(where: Where, *base: Sequence[str]) -> Callable[[Sequence[str]], RunConfig]:
    """Returns the config with further overrides."""
    from shardkit.config.load import load_config

    return lambda more: load_config(None, settings(where, *base, more)).config


def train(
    where: Where, overrides: Sequence[str], cap: str | None = None, steps: int = 4, name: str = "run", ranks: int = 1,
    card: Mapping[str, str] | None = None, traced: bool = True,
) -> Trial:  # fmt: skip
    """Train a few steps in processes of their own, in `folder/NAME`; an emulated card has no speed.

    Args:
        card: the variables of the emulated cards (`emulated_card`), if they are not `where.card`.
        traced: whether emulated cards' second step is traced tensor by tensor: then blocks lie otherwise.
    """
    from shardkit.plan.search.trial import read_trial, run_trial, trial_settings

    chosen, folder = settings(where, overrides), where.folder / name
    if not where.emulated:
        return run_trial(None, chosen, ranks, folder, steps, cap)
    assert where.helpers is not None
    nursery = where.helpers.nursery(card or emulated_card(GPUS[where.card]))
    trial = read_trial(folder, *nursery.train(trial_settings(chosen, folder, steps, cap, traced), ranks))
    return replace(trial, tokens_per_s=None)


def planned(where: Where, config: RunConfig, to: Target) -> MemoryEstimate:
    """The planner's estimate of a config's memory."""
    from shardkit.plan.client import plan

    return plan(config, to) if where.helpers is None else where.helpers.planner(to).predict(config)


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


def _traced_peak(run: Path) -> Figures:
    """Bytes, phase and categories of the traced step's peak on the rank where it is largest.

    `unattributed` are the allocator's bytes that no category has.
    """
    traces = [json.loads(path.read_text()) for path in sorted((run / "trace").glob("rank*.json"))]
    peak: Figures = max((trace["peak"] for trace in traces), key=lambda peak: float(peak["bytes"]))
    return peak


def went_traced(trial: Trial, run: Path) -> Figures:
    """A trial in JSON's types, with the peak that was traced in `run`, if it succeeded."""
    return went(trial) if trial.outcome != "ok" else {**went(trial), "traced": _traced_peak(run)}


def next_size(trials: Figures, start: int, stride: int) -> int | None:
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
