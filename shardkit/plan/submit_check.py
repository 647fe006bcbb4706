"""Plan a job before it is queued, and refuse one that cannot fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..config.schema import RunConfig
from ..errors import ConfigError, gib
from .advise import Changes
from .client import Planner
from .model.estimate import MemoryEstimate
from .show import show_changes
from .target import Target

Advisor = Callable[[MemoryEstimate, Planner], Changes]
"""(the estimate of a job that does not fit, its planner) → changes that need less memory, each planned."""


def refuse_misfit(
    config: RunConfig, target: Target, advisor: Advisor, loop: Mapping[str, Any] | None = None
) -> MemoryEstimate:
    """Plan a job, and return the estimate if the job fits.

    Args:
        config: the job as a config.
        advisor: plans changes of the job, in the keys of the files that describe it.
        loop: for the planner: how another tool's loop differs from shardkit's.

    Raises:
        ConfigError: the job does not fit; changes that would make it fit are printed on stderr.
    """
    with Planner(target, loop=loop) as planner:
        estimate = planner.predict(config)
        if estimate.verdict == "does not fit":
            raise _refused(estimate, advisor(estimate, planner))
        return estimate


def _refused(estimate: MemoryEstimate, changes: Changes) -> ConfigError:
    print(show_changes(changes), file=sys.stderr)
    fitting = [change.text for change in changes if change.estimate.verdict != "does not fit"]
    return ConfigError(
        misfit(estimate),
        f"{fitting[0]}, or submit it anyway with --force" if fitting else "use more or larger GPUs, or pass --force",
    )


def misfit(estimate: MemoryEstimate) -> str:
    """One line that says which memory is short, by how much and where."""
    peak = estimate.peak
    if estimate.device_memory is not None and estimate.needed > estimate.device_memory:
        moment = peak.phase + (f", {peak.module}" if peak.module else "")
        whose = "for the tensors of each rank" if estimate.device == "cpu" else "on each GPU"
        return (
            f"the job needs {gib(estimate.needed)} {whose} of {gib(estimate.device_memory)} ({estimate.device}); "
            f"the peak is in {moment}"
        )
    return f"each rank needs {gib(estimate.host_peak)} of host memory, and has {gib(estimate.host_memory or 0)}"
