"""The progress of a save on each rank, and the time for which it may stand still."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .native import layout

FIRST_S = 1800.0
"""A run's first save may stand still for this long."""
LEAST_S = 120.0
_TIMES = 10
"""Later saves may stand still for ten times the longest save so far, or for two minutes if that is longer."""


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
    """How far a rank has come in the unfinished save below `root`, judged by its file alone."""
    drafts = sorted(root.glob(f"step_*{layout.TMP}"))
    if not drafts:
        return "before the save's first file"
    path = drafts[-1] / file_name
    try:
        size = path.stat().st_size
    except OSError:
        return f"before it wrote {drafts[-1].name}/{file_name}"
    return f"in or after {drafts[-1].name}/{file_name}, which has {size} bytes"
