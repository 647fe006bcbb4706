"""Changes that make a job fit: candidates from the memory rules, each one planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.schema import RunConfig
from ..errors import ShardkitError
from ..memory.rows import KINDS, StateBytes
from ..oom.advice import Used, advise
from .client import Planner
from .model.estimate import CategoryEstimate, MemoryEstimate

N_PLANNED = 6
LIMIT_S = 60.0
"""Most seconds for the plans of changes."""
ROUGHLY = 0.1
"""Relative error of a change that is planned from a few layers."""
Changed = Callable[[Sequence[str]], tuple[RunConfig, Mapping[str, Any] | None]]
"""The config with more overrides, and its loop if that is not the planner's; raises a ShardkitError for overrides that
it cannot have."""
_ORDER = {"fits": 0, "tight": 1, "does not fit": 2, None: 0}


@dataclass(frozen=True)
class Change:
    """One change of the config and its predicted effect.

    Attributes:
        settings: overrides as on the command line, separated by spaces.
        saving: bytes saved on the device, or on the host if host memory was short.
        cost: the price of the change, in words.
        estimate: the memory with the change.
        in_the_files: the change in the keys of another tool's files; empty for a config.
        rough: planned from a few layers of a deep model.
    """

    settings: str
    saving: int
    cost: str
    estimate: MemoryEstimate
    in_the_files: str = ""
    rough: bool = False

    @property
    def text(self) -> str:
        """The change as its reader writes it."""
        return self.in_the_files or self.settings


class Changes(list[Change]):
    """Planned changes.

    Attributes:
        left_out: changes that were not planned for lack of time, as their reader writes them.
    """

    left_out: Sequence[str] = ()


def changes_that_fit(config: RunConfig, estimate: MemoryEstimate, planner: Planner, changed: Changed) -> Changes:
    """Changes that save memory, those that fit first; pairs of changes too if no single one fits.

    Changes of a deep model are predicted from a few of its layers, and corrected by what that misses of the job itself.
    After `LIMIT_S` the planner is stopped, and changes without a prediction are left out.

    Args:
        config: without changes; `estimate` is its prediction.
    """
    target = planner.target
    scarce = "host" if estimate.device_memory is None or estimate.needed <= estimate.device_memory else "device"
    kind = "cpu" if estimate.device == "cpu" else "cuda"
    candidates = [
        (advice.change, advice.cost)
        for advice in advise(config, target.world_size, target.ranks_per_node, kind, _used(estimate, scarce))
        if "=" in advice.change
    ]
    if config.activation.policy == "none" and scarce == "device":
        candidates.insert(0, ("activation.policy=selective", "attention runs twice: a few percent more compute"))
    with planner.stopping_after(LIMIT_S):
        plans = _Plans(config, estimate, planner, changed, scarce)
        changes = plans.of(candidates)
        if changes and not any(change.estimate.verdict in ("fits", "tight") for change in changes):
            pairs = [
                (f"{change.settings} {later.settings}", f"{change.cost}; {later.cost}")
                for index, change in enumerate(changes[:3])
                for later in changes[index + 1 : 4]
                if not _keys(change.settings) & _keys(later.settings)
            ]
            changes = plans.of(pairs) + changes
    planned = Changes(sorted(changes, key=lambda change: (_ORDER[change.estimate.verdict], -change.saving)))
    planned.left_out = plans.left_out
    return planned


class _Plans:
    """Plans changes of one job, one after the other."""

    def __init__(
        self, config: RunConfig, estimate: MemoryEstimate, planner: Planner, changed: Changed, scarce: str
    ) -> None:
        self._config, self._estimate, self._planner, self._changed = config, estimate, planner, changed
        self._scarce = scarce
        self._rough: MemoryEstimate | None = None
        self.left_out: list[str] = []

    def of(self, candidates: Sequence[tuple[str, str]]) -> list[Change]:
        """Those of the (settings, cost) that save memory, the largest saving first."""
        changes: list[Change] = []
        planned = 0
        for settings, cost in candidates:
            if planned > N_PLANNED:
                break
            try:
                after = None if self._planner.is_stopped else self._predicted(*self._changed(settings.split(" ")))
            except ShardkitError:
                if not self._planner.is_stopped:
                    continue  # do not advise settings that conflict or cannot be traced
                after = None
            if after is None:
                self.left_out.append(settings)
                continue
            planned += 1
            saving = self._saving(after)
            if saving > 0:
                rough = bool(after.extrapolated_from) and not self._estimate.extrapolated_from
                changes.append(Change(settings, saving, cost, after, rough=rough))
        return sorted(changes, key=lambda change: -change.saving)

    def _saving(self, after: MemoryEstimate) -> int:
        estimate = self._estimate
        return estimate.host_peak - after.host_peak if self._scarce == "host" else estimate.needed - after.needed

    def _predicted(self, config: RunConfig, loop: Mapping[str, Any] | None) -> MemoryEstimate:
        """The memory with a change: exact, or rough and corrected by the error of a rough estimate of the job."""
        rough = self._planner.rough(config, loop)
        if rough is not None and self._rough is None:
            self._rough = self._planner.rough(self._config)
        if rough is None or self._rough is None:
            return self._planner.predict(config, loop=loop)
        return corrected(rough, self._rough, self._estimate)


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


def _used(estimate: MemoryEstimate, scarce: str) -> Used:
    state = {
        kind: StateBytes(category.device, category.host)
        for kind in KINDS
        for category in [estimate.categories.get(kind, CategoryEstimate(0, 0))]
    }
    unclassified = sum(c.device for name, c in estimate.categories.items() if name not in KINDS)
    return Used(
        short_of="host" if scarce == "host" else "device",
        state=state,
        not_state=unclassified,
        phase=estimate.peak.phase,
        n_blocks=estimate.n_blocks,
        packable=(
            estimate.n_packable / max(estimate.n_params, 1),
            estimate.n_packable_experts / max(estimate.n_params, 1),
        ),
    )
