"""How far a save is on each rank, and how long it may stand still."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .native import layout

FIRST_S = 1800.0
"""A run's first save may stand still for this long."""
LEAST_S = 120.0
_TIMES = 10
"""Later ones may stand still for ten times the longest save so far, or two minutes if that is more."""


def standstill_s(configured_s: float | None, measured_s: Sequence[float]) -> float:
    """Seconds in which a save may write no byte before it counts as stuck.

    Args:
        configured_s: `checkpoint.timeout_s`; replaces the measured limit.
        measured_s: durations of the run's saves so far.
    """
    if configured_s is not None:
        return configured_s
    return max(LEAST_S, _TIMES * max(measured_s)) if measured_s else FIRST_S


def seen_on_disk(root: Path, rank: int, file_name: str) -> str:
    """How far a rank is in the unfinished save below `root`, for a rank that cannot say so itself."""
    drafts = sorted(root.glob(f"step_*{layout.TMP}"))
    if not drafts:
        return "before the save's first file"
    path = drafts[-1] / file_name
    try:
        size = path.stat().st_size
    except OSError:
        return f"before it wrote {drafts[-1].name}/{file_name}"
    return f"in or after {drafts[-1].name}/{file_name}, which has {size} bytes"
