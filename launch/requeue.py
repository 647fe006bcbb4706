"""Whether a job goes back to the queue, and the record of every start: RUN_DIR/logs/restarts.jsonl."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from . import exit_codes

MAX_IDLE_STARTS = 3
"""Starts in a row without one optimizer step, after which a job is not queued again."""


def record_path(run_dir: Path) -> Path:
    """The record of starts."""
    return run_dir / "logs" / "restarts.jsonl"


def note_start(run_dir: Path, job_id: str, restart: int) -> None:
    """Record that the job starts, and the step it stands at."""
    _append(run_dir, {"event": "start", "job": job_id, "restart": restart, "step": last_step(run_dir)})


def note_end(run_dir: Path, job_id: str, restart: int, reason: str) -> None:
    """Record why this start ended."""
    _append(run_dir, {"event": "end", "job": job_id, "restart": restart, "step": last_step(run_dir), "reason": reason})


def last_step(run_dir: Path) -> int:
    """The last optimizer step in metrics.jsonl; 0 before the first."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65536))
            lines = file.read().splitlines()
    except OSError:
        return 0
    return next((int(step) for line in reversed(lines) if (step := _parsed(line).get("step")) is not None), 0)


def reason(job_id: str, came: Sequence[signal.Signals], stopped: bool) -> str | None:
    """Why the job should be queued again; None if it should not.

    USR2 comes from Slurm alone: before the time limit, or at a preemption. TERM may be a user's scancel, so that only
    Slurm's own note of a preemption counts. A step that died without having saved is queued again at a preemption, and
    resumes from its last checkpoint.
    """
    if stopped and signal.SIGUSR2 in came:
        return "saved after USR2"
    shown = _show(job_id)
    if re.search(r" PreemptTime=\d", shown):
        return "preempted"
    return None


def refusal(run_dir: Path, job_id: str, max_requeues: int) -> LaunchError | None:
    """Why a job that may be queued again is not: too often, or it never gets anywhere."""
    starts = [e for e in read(run_dir) if e.get("job") == job_id and e.get("event") == "start"]
    if len(starts) > max_requeues:
        return LaunchError(
            f"job {job_id} was queued again {max_requeues} times", "raise --max-requeues, or submit it anew"
        )
    recent = [e["step"] for e in starts[-MAX_IDLE_STARTS:]]
    if len(recent) == MAX_IDLE_STARTS and recent[0] == last_step(run_dir):
        return LaunchError(
            f"job {job_id} made no step in {MAX_IDLE_STARTS} starts (it stands at {recent[0]})",
            "look at the starts' logs; give it more time before the signal (--signal-s), or fewer preemptions (--qos)",
        )
    return None


def queue_again(job_id: str) -> int:
    """Hand the job back; Slurm ends this script with SIGTERM meanwhile. Returns the exit code where it refuses."""
    done = subprocess.run(["scontrol", "requeue", job_id], capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(
            f"scontrol requeue {job_id} refused: {' '.join(done.stderr.split())}",
            "submit the job again with run.resume=true; the checkpoint is kept",
        )
    time.sleep(120)
    return exit_codes.PREEMPTED


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Every recorded start and end."""
    try:
        lines = record_path(run_dir).read_text().splitlines()
    except OSError:
        return []
    return [event for line in lines if (event := _parsed(line))]


def _parsed(line: str | bytes) -> dict[str, Any]:
    """The object on a line; empty for one that a kill cut short."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _append(run_dir: Path, event: dict[str, Any]) -> None:
    path = record_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **event}) + "\n")


def _show(job_id: str) -> str:
    done = subprocess.run(["scontrol", "show", "job", job_id, "-o"], capture_output=True, text=True)
    return done.stdout
