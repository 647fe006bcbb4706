"""A run's profile on disk: where it lies, and how it is read. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import DataError

FOLDER = "profile"
SCHEMA = 1
"""Of `rank{r}_summary.json`; grows when a field changes its meaning or goes away."""


def read_summaries(run_dir: Path) -> list[dict[str, Any]]:
    """Every profiled rank's summary, the one with the largest peak first.

    Raises:
        DataError: no such directory, a run without a profile, or a file that is no summary.
    """
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a directory", "pass the run.dir of a run")
    paths = sorted((run_dir / FOLDER).glob("rank*_summary.json"))
    if not paths:
        raise DataError(
            f"{run_dir} holds no profile", "train with profile.start=STEP, a step of the run (later than the first)"
        )
    summaries = [_read(path) for path in paths]
    return sorted(summaries, key=lambda summary: (-summary["peak"]["bytes"], summary["rank"]))


def _read(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text())
        schema = summary["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "profile the run again") from error
    if schema != SCHEMA:
        raise DataError(f"{path} has schema {schema}, this version reads {SCHEMA}", "profile the run again")
    return {**summary, "files": {name: str(path.parent / file) for name, file in summary["files"].items()}}
