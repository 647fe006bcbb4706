"""Changes that make a job fit: candidates from the memory rules, each one planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config.schema import RunConfig
from ..errors import ShardkitError
from ..memory.rows import KINDS, StateBytes
from ..oom.advice import Used, advise
from .client import Planner
from .model.estimate import MemoryEstimate

N_PLANNED = 6
Changed = Callable[[Sequence[str]], RunConfig]
"""Returns the config with more overrides."""
_ORDER = {"fits": 0, "tight": 1, "does not fit": 2, None: 0}


@dataclass(frozen=True)
class Change:
    """One change of the config and its predicted effect.

    Attributes:
        settings: overrides as on the command line, separated by spaces.
        saving: bytes saved on the device, or on the host if host memory was short.
        cost: the price of the change, in words.
        estimate: the memory with the change.
    """

    settings: str
    saving: int
    cost: str
    estimate: MemoryEstimate


def changes_that_fit(changed: Changed, estimate: MemoryEstimate, planner: Planner) -> list[Change]:
    """Changes that save memory, those that fit first; pairs of changes too if no single one fits."""
    config, target = changed([]), planner.target
    where = "host" if estimate.device_memory is None or estimate.needed <= estimate.device_memory else "device"
    candidates = [
        (advice.change, advice.cost)
        for advice in advise(config, target.world_size, target.ranks_per_node, _kind(estimate), _used(estimate, where))
        if "=" in advice.change
    ][:N_PLANNED]
    if config.activation.policy == "none" and where == "device":
        candidates.insert(0, ("activation.policy=selective", "attention runs twice: a few percent more compute"))
    found = _planned(changed, estimate, planner, candidates, where)
    if found and not any(change.estimate.verdict in ("fits", "tight") for change in found):
        pairs = [
            (f"{one.settings} {other.settings}", f"{one.cost}; {other.cost}")
            for index, one in enumerate(found[:3])
            for other in found[index + 1 : 4]
            if not _keys(one.settings) & _keys(other.settings)
        ]
        found = _planned(changed, estimate, planner, pairs, where) + found
    return sorted(found, key=lambda change: (_ORDER[change.estimate.verdict], -change.saving))


def _planned(
    changed: Changed, estimate: MemoryEstimate, planner: Planner, candidates: Sequence[tuple[str, str]], where: str
) -> list[Change]:
    found = []
    for settings, cost in candidates:
        try:
            after = planner.predict(changed(settings.split(" ")))
        except ShardkitError:
            continue  # do not advise settings that conflict or cannot be traced
        saving = estimate.host_peak - after.host_peak if where == "host" else estimate.needed - after.needed
        if saving > 0:
            found.append(Change(settings, saving, cost, after))
    return sorted(found, key=lambda change: -change.saving)


def _keys(settings: str) -> set[str]:
    return {item.partition("=")[0] for item in settings.split(" ")}


def _kind(estimate: MemoryEstimate) -> str:
    return "cpu" if estimate.device == "cpu" else "cuda"


def _used(estimate: MemoryEstimate, where: str) -> Used:
    state = {
        kind: StateBytes(found.device, found.host) if (found := estimate.categories.get(kind)) else StateBytes(0, 0)
        for kind in KINDS
    }
    other = sum(c.device for name, c in estimate.categories.items() if name not in KINDS)
    return Used(
        where="host" if where == "host" else "device",
        state=state,
        other=other,
        phase=estimate.peak.phase,
        n_blocks=estimate.n_blocks,
    )
