"""Changes that make a job fit: the candidates of `oom.advice`, each one planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config.load import Layers, split_override
from ..config.schema import RunConfig
from ..config.yaml import Document
from ..errors import ShardkitError
from ..oom.advice import candidates
from .client import Planner
from .model.estimate import ROUGHLY, MemoryEstimate

MOST, ENOUGH = 6, 2
"""Most changes to plan, and most pairs of them; and how many that fit are enough, the cheapest being planned first."""
LIMIT_S = 60.0
"""Most seconds for the plans of changes."""
_ORDER = {"fits": 0, "tight": 1, "does not fit": 2, None: 0}
_OF_ACTIVATIONS = ("activations", "workspace", "unattributed")


@dataclass(frozen=True)
class Change:
    """One change of the config and its predicted effect."""

    settings: str  # overrides as on the command line, separated by spaces
    saving: int  # bytes saved on the device, or on the host if host memory was short
    cost: str  # the price of the change, in words
    estimate: MemoryEstimate  # the memory with the change
    rough: bool = False  # planned from a few layers of a deep model


class Changes(list[Change]):
    left_out: Sequence[str] = ()  # settings that were not planned for lack of time


def changes_that_fit(config: RunConfig, estimate: MemoryEstimate, planner: Planner) -> Changes:
    """Changes that save memory, those that fit first; pairs of changes too if no single one fits.

    Changes of a deep model are predicted from a few of its layers, and corrected by what that misses of the job itself.
    After `LIMIT_S` the planner is stopped, and changes without a prediction are left out. `config`: without changes;
    `estimate` is its prediction.
    """
    target = planner.target
    is_device_short = estimate.device_memory is not None and estimate.needed > estimate.device_memory
    scarce = "device" if is_device_short else "host"
    categories = estimate.categories.items()
    activations = sum(category.device for name, category in categories if name in _OF_ACTIVATIONS)
    parts = ("activations", "state") if 2 * activations > estimate.peak.allocated else ("state", "activations")
    singles = candidates(
        config, target.world_size, target.ranks_per_node, "cpu" if estimate.device == "cpu" else "cuda",
        short_of=scarce, parts=parts,
        packable=(estimate.n_packable / max(estimate.n_params, 1),
                  estimate.n_packable_experts / max(estimate.n_params, 1)),
    )  # fmt: skip
    left_out: list[str] = []
    # A job that was predicted from a few layers itself needs no correction.
    job_roughly = estimate if estimate.extrapolated_from else None

    def planned(settings: str) -> MemoryEstimate:
        nonlocal job_roughly
        layers = Layers()
        layers.add_file("the config", Document(config.model_dump(mode="json")))
        for setting in settings.split(" "):
            layers.add_override(*split_override(setting), raw=True)
        changed = layers.resolve()[0]
        rough = planner.rough(changed)
        if rough is None:
            return planner.predict(changed)
        job_roughly = job_roughly or planner.rough(config)
        return rough if job_roughly is None else corrected(rough, job_roughly, estimate)

    def savings(changes: Sequence[tuple[str, str]]) -> list[Change]:
        found: list[Change] = []
        n_planned = 0
        for settings, cost in changes:
            if planner.is_stopped:
                left_out.append(settings)
                continue
            n_fitting = sum(change.estimate.verdict in ("fits", "tight") for change in found)
            if n_planned == MOST or n_fitting == ENOUGH:
                break
            try:
                after = planned(settings)
            except ShardkitError:  # settings that conflict or cannot be traced are no advice
                left_out.extend([settings] if planner.is_stopped else [])
                continue
            n_planned += 1
            saving = estimate.needed - after.needed if is_device_short else estimate.host_peak - after.host_peak
            if saving > 0:
                rough = bool(after.extrapolated_from) and not estimate.extrapolated_from
                found.append(Change(settings, saving, cost, after, rough))
        return sorted(found, key=lambda change: -change.saving)

    with planner.stopping_after(LIMIT_S):
        changes = savings(singles)
        if changes and not any(change.estimate.verdict in ("fits", "tight") for change in changes):
            pairs = [
                (f"{change.settings} {later.settings}", f"{change.cost}; {later.cost}")
                for index, change in enumerate(changes[:3])
                for later in changes[index + 1 : 4]
                if not _keys(change.settings) & _keys(later.settings)
            ]
            changes = savings(pairs) + changes
    planned_changes = Changes(sorted(changes, key=lambda change: (_ORDER[change.estimate.verdict], -change.saving)))
    planned_changes.left_out = left_out
    return planned_changes


def corrected(rough: MemoryEstimate, job_roughly: MemoryEstimate, job: MemoryEstimate) -> MemoryEstimate:
    """A rough estimate of a change, shifted by the difference between the job's own two estimates."""
    peak, roughly, exact = rough.peak, job_roughly.peak, job.peak
    return replace(
        rough,
        peak=replace(
            peak,
            allocated=max(0, peak.allocated + exact.allocated - roughly.allocated),
            reserved=max(0, peak.reserved + exact.reserved - roughly.reserved),
            required=max(0, peak.required + exact.required - roughly.required),
        ),
        host_peak=max(0, rough.host_peak + job.host_peak - job_roughly.host_peak),
        uncertainty=max(rough.uncertainty, ROUGHLY),
    )


def _keys(settings: str) -> set[str]:
    return {item.partition("=")[0] for item in settings.split(" ")}
