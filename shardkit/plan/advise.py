"""Changes that make a job fit: candidates from the memory rules, each one planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config.schema import RunConfig
from ..errors import ShardkitError
from ..memory.rows import KINDS, StateBytes
from ..oom.advice import Used, advise
from .model.estimate import CategoryEstimate, MemoryEstimate
from .target import Target

N_PLANNED = 6
Predict = Callable[[Sequence[str]], MemoryEstimate]
"""Predicts the config with more overrides; raises a ShardkitError for those that it cannot have."""
_ORDER = {"fits": 0, "tight": 1, "does not fit": 2, None: 0}


@dataclass(frozen=True)
class Change:
    """One change of the config and its predicted effect.

    Attributes:
        settings: overrides as on the command line, separated by spaces.
        saving: bytes saved on the device, or on the host if host memory was short.
        cost: the price of the change, in words.
        estimate: the memory with the change.
        said: the change in the keys of another tool's files; empty for a config.
    """

    settings: str
    saving: int
    cost: str
    estimate: MemoryEstimate
    said: str = ""

    @property
    def text(self) -> str:
        """The change as its reader writes it."""
        return self.said or self.settings


def changes_that_fit(config: RunConfig, estimate: MemoryEstimate, target: Target, predict: Predict) -> list[Change]:
    """Changes that save memory, those that fit first; pairs of changes too if no single one fits.

    Args:
        config: without changes; `estimate` is its prediction.
    """
    scarce = "host" if estimate.device_memory is None or estimate.needed <= estimate.device_memory else "device"
    candidates = [
        (advice.change, advice.cost)
        for advice in advise(config, target.world_size, target.ranks_per_node, _kind(estimate), _used(estimate, scarce))
        if "=" in advice.change
    ]
    if config.activation.policy == "none" and scarce == "device":
        candidates.insert(0, ("activation.policy=selective", "attention runs twice: a few percent more compute"))
    changes = _planned(predict, estimate, candidates, scarce)
    if changes and not any(change.estimate.verdict in ("fits", "tight") for change in changes):
        pairs = [
            (f"{change.settings} {later.settings}", f"{change.cost}; {later.cost}")
            for index, change in enumerate(changes[:3])
            for later in changes[index + 1 : 4]
            if not _keys(change.settings) & _keys(later.settings)
        ]
        changes = _planned(predict, estimate, pairs, scarce) + changes
    return sorted(changes, key=lambda change: (_ORDER[change.estimate.verdict], -change.saving))


def _planned(
    predict: Predict, estimate: MemoryEstimate, candidates: Sequence[tuple[str, str]], scarce: str
) -> list[Change]:
    changes: list[Change] = []
    planned = 0
    for settings, cost in candidates:
        if planned > N_PLANNED:
            break
        try:
            after = predict(settings.split(" "))
        except ShardkitError:
            continue  # do not advise settings that conflict or cannot be traced
        planned += 1
        saving = estimate.host_peak - after.host_peak if scarce == "host" else estimate.needed - after.needed
        if saving > 0:
            changes.append(Change(settings, saving, cost, after))
    return sorted(changes, key=lambda change: -change.saving)


def _keys(settings: str) -> set[str]:
    return {item.partition("=")[0] for item in settings.split(" ")}


def _kind(estimate: MemoryEstimate) -> str:
    return "cpu" if estimate.device == "cpu" else "cuda"


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
    )
