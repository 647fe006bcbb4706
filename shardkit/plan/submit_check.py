"""Plan a job before it is queued, and refuse one that cannot fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ..config.foreign.translate import Job
from ..config.schema import RunConfig
from ..errors import ConfigError
from .advise import Change, changes_that_fit
from .client import Planner
from .model.estimate import MemoryEstimate
from .show import show_changes
from .target import Target
from .their_keys import changes_in_their_keys


def refuse_misfit(changed: Callable[[Sequence[str]], RunConfig], target: Target) -> MemoryEstimate:
    """Plan a config, given as a function of more overrides; returns the estimate.

    Raises:
        ConfigError: the job does not fit; changes that would make it fit are printed on stderr.
    """
    config = changed([])
    with Planner(target) as planner:
        estimate = planner.predict(config)
        if estimate.verdict == "does not fit":
            changes = changes_that_fit(config, estimate, target, lambda overrides: planner.predict(changed(overrides)))
            raise _refused(estimate, changes)
        return estimate


def refuse_their_misfit(job: Job, overrides: Sequence[str], target: Target) -> MemoryEstimate:
    """Plan a job of other tools; returns the estimate.

    Args:
        overrides: settings that no file has.

    Raises:
        ConfigError: its files leave something open; or it does not fit, and changes of its files that would make it
            fit are printed on stderr.
    """
    config = job.load(overrides).config
    with Planner(target, loop=job.loop) as planner:
        estimate = planner.predict(config)
        if estimate.verdict == "does not fit":
            raise _refused(estimate, changes_in_their_keys(job, overrides, estimate, planner))
        return estimate


def _refused(estimate: MemoryEstimate, changes: Sequence[Change]) -> ConfigError:
    print(show_changes(changes), file=sys.stderr)
    fitting = [change.text for change in changes if change.estimate.verdict != "does not fit"]
    return ConfigError(
        misfit(estimate),
        f"{fitting[0]}, or submit it anyway with --force" if fitting else "use more or larger GPUs, or pass --force",
    )


def misfit(estimate: MemoryEstimate) -> str:
    """One line that says which memory is short, by how much and where."""
    from ..errors import gib

    peak = estimate.peak
    if estimate.device_memory is not None and estimate.needed > estimate.device_memory:
        moment = peak.phase + (f", {peak.module}" if peak.module else "")
        whose = "for the tensors of each rank" if estimate.device == "cpu" else "on each GPU"
        return (
            f"the job needs {gib(estimate.needed)} {whose} of {gib(estimate.device_memory)} ({estimate.device}); "
            f"the peak is in {moment}"
        )
    return f"each rank needs {gib(estimate.host_peak)} of host memory, and has {gib(estimate.host_memory or 0)}"
