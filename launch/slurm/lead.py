"""How long before its end a job has to be told to save: what its saves and steps have taken so far."""

from __future__ import annotations

import math
from pathlib import Path

from ..failures.record import tail

DEFAULT_S = 120
"""Lead of a run that has saved nothing yet."""
_SLACK_S = 30  # for the ranks to hear of it, and for Slurm to take the job back
_USUAL = 0.95  # of the steps: the first one after a start may compile


def needed_s(run_dir: Path) -> int | None:
    """Seconds that the end of a run takes: a long step, then its longest save, twice over.

    Twice, because a save in the background may have to be waited for, and disks have bad days. None: nothing was saved.
    """
    saves = [float(save["total_s"]) for save in tail(run_dir / "logs" / "checkpoints.jsonl") if "total_s" in save]
    if not saves:
        return None
    steps = sorted(float(step["step_time_s"]) for step in tail(run_dir / "metrics.jsonl") if "step_time_s" in step)
    step = steps[int(_USUAL * (len(steps) - 1))] if steps else 0.0
    return _SLACK_S + math.ceil(2 * (max(saves) + step))


def signal_s(asked: int | None, run_dir: Path, resume: bool | str) -> int:
    """Seconds before the time limit at which Slurm should signal: as asked, else by the run that this one goes on with.

    Slurm rounds to its own clock, up to a minute early, never late.
    """
    if asked is not None:
        return asked
    earlier = [run_dir, *([Path(resume), *Path(resume).parents[:2]] if isinstance(resume, str) else [])]
    return max([DEFAULT_S, *(needed for path in earlier if (needed := needed_s(path)) is not None)])
