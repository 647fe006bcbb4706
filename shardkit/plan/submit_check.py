"""Plan a job before it is queued, and refuse one that cannot fit."""

from __future__ import annotations

import sys

from ..errors import ConfigError
from .advise import Changed, changes_that_fit
from .client import Planner
from .model.estimate import MemoryEstimate
from .show import show_changes
from .target import Target


def refuse_misfit(changed: Changed, target: Target) -> MemoryEstimate:
    """Plan a config, given as a function of more overrides; returns the estimate.

    Raises:
        ConfigError: the job does not fit; changes that would make it fit are printed on stderr.
    """
    with Planner(target) as planner:
        estimate = planner.predict(changed([]))
        if estimate.verdict != "does not fit":
            return estimate
        changes = changes_that_fit(changed, estimate, planner)
    print(show_changes(changes), file=sys.stderr)
    fitting = [change.settings for change in changes if change.estimate.verdict != "does not fit"]
    raise ConfigError(
        misfit(estimate),
        f"{fitting[0]}, or submit it anyway with --force" if fitting else "use more or larger GPUs, or pass --force",
    )


def misfit(estimate: MemoryEstimate) -> str:
    """One line that says which memory is short, by how much and where."""
    from ..errors import gib

    peak = estimate.peak
    if estimate.device_memory is not None and estimate.needed > estimate.device_memory:
        place = peak.phase + (f", {peak.module}" if peak.module else "")
        whose = "for the tensors of each rank" if estimate.device == "cpu" else "on each GPU"
        return (
            f"the job needs {gib(estimate.needed)} {whose} of {gib(estimate.device_memory)} ({estimate.device}); "
            f"the peak is in {place}"
        )
    return f"each rank needs {gib(estimate.host_peak)} of host memory, and has {gib(estimate.host_memory or 0)}"
