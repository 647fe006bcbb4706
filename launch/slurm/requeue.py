"""Whether a job goes back to the queue, without the nodes that let it down."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ...errors import LaunchError
from ..failures import exit_codes, job_starts
from ..failures.failure import Failure
from . import commands

MAX_IDLE_STARTS = 3
"""Starts in a row that ended by themselves without one optimizer step, after which a job is not started again."""
PREEMPTED_BY_SLURM = "preempted"
TAKEN_BACK = "taken back by Slurm"
NOT_ITS_DOING = (PREEMPTED_BY_SLURM, TAKEN_BACK)
"""Ends that say nothing about the job."""
_ENDS = {
    "PREEMPTED": PREEMPTED_BY_SLURM,
    "PREEMPTION": PREEMPTED_BY_SLURM,
    "REQUEUED": TAKEN_BACK,
    "JOB REQUEUE": TAKEN_BACK,
    "NODE_FAIL": "its node was lost",
    "NODE FAILURE": "its node was lost",
    "TIMEOUT": "its time limit",
    "TIME LIMIT": "its time limit",
    "OUT_OF_MEMORY": "out of memory by its cgroup's record",
}
"""Words of sacct and slurmstepd → how a start ended."""
_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (\S+) DUE TO ([A-Z ]*[A-Z])")

# What CUDA, NCCL and the kernel say when it is the machine that failed: another start there would fail as well.
_NODE_FAULT = re.compile(
    r"uncorrectable ECC|uncorrectable NVLink|fallen off the bus|Xid|GPU is lost|hardware stack error"
    r"|CUDA driver initialization failed|system not yet initialized"
    r"|CUDA-capable device\(s\) is/are busy or unavailable",
    re.IGNORECASE,
)


_BEGAN = time.strftime("%Y-%m-%dT%H:%M:%S")  # this process is one start of the job


@dataclass(frozen=True)
class Outlook:
    """What Slurm plans for a job.

    Attributes:
        ends_at: when its time limit ends it, seconds since the epoch; None without a limit.
        preempted: whether Slurm is taking it off its nodes.
        excluded: nodes that it will not run on, as Slurm writes lists.
        restarts: how often it was queued again; more than the job knows of once Slurm has taken it back.
    """

    ends_at: float | None = None
    preempted: bool = False
    excluded: str = ""
    restarts: int = 0


def outlook(job_id: str) -> Outlook:
    """Ask Slurm; an empty outlook where it does not answer."""
    shown = commands.ask("scontrol", "show", "job", job_id, "-o").stdout
    end = re.search(r" EndTime=(\d{4}-\S+)", shown)
    excluded = re.search(r" ExcNodeList=(\S+)", shown)
    restarts = re.search(r" Restarts=(\d+)", shown)
    return Outlook(
        ends_at=datetime.fromisoformat(end[1]).timestamp() if end else None,
        preempted=re.search(r" PreemptTime=\d", shown) is not None,
        excluded=excluded[1] if excluded and excluded[1] != "(null)" else "",
        restarts=int(restarts[1]) if restarts else 0,
    )


def end_by_slurm(job_id: str, restart: int, since: str) -> str | None:
    """How Slurm says that a start ended: its accounting, else what it wrote to the job's output; None: it does not.

    Args:
        since: when it started, as Slurm writes times.
    """
    asked = ("--jobs", job_id, "--duplicates", "--allocations", "--noheader", "--parsable2", "--format=Start,State")
    done = commands.ask("sacct", *asked)
    starts = sorted(line.split("|") for line in done.stdout.splitlines() if line.count("|") == 1)
    if done.returncode == 0 and len(starts) > restart:
        found = _ENDS.get(starts[restart][1].partition(" ")[0])
        if found is not None:
            return found
    output = re.search(r"^\s*StdOut=(.*)$", commands.ask("scontrol", "show", "job", job_id).stdout, re.MULTILINE)
    try:
        text = Path(output[1]).read_text(errors="replace") if output else ""
    except OSError:
        return None
    said = [why for when, why in _CANCELLED.findall(text) if when >= since]
    return _ENDS.get(said[-1]) if said else None


def taken_back(job_id: str, restart: int) -> str | None:
    """Why Slurm takes a running job off its nodes, or has done so; None: it does not."""
    now = outlook(job_id)
    if now.preempted:
        return PREEMPTED_BY_SLURM
    return (end_by_slurm(job_id, restart, _BEGAN) or TAKEN_BACK) if now.restarts > restart else None


def reason(
    job_id: str,
    came: Sequence[signal.Signals],
    failures: Sequence[Failure],
    stopped: bool,
    saved: int | None,
    restart: int = 0,
) -> str | None:
    """Why the job should be queued again; None if it should not.

    USR2 comes from Slurm alone: before the time limit, or at a preemption. TERM may be a user's scancel, so that only
    Slurm's own note of a preemption counts, or that it has queued the job again by itself: without a GraceTime it notes
    nothing else. A step that died without having saved is queued again at a preemption, and resumes from its last
    checkpoint. After USR2 it has to stand on a checkpoint that this start made: without one the next start would come
    no further.

    Args:
        saved: the step of the newest checkpoint, if this start made it.
    """
    told = signal.SIGUSR2 in came
    if told and stopped and saved is not None:
        return "saved after USR2"
    why = taken_back(job_id, restart)
    if failures and failures[0].exit_code == exit_codes.UNSAVED:
        goes_on = saved is not None and (told or why is not None)
        return f"the last save failed, goes on from step {saved}" if goes_on else None
    if why is not None and not any(found.is_error and not found.lost_peer for found in failures):
        return why
    bad = bad_nodes(failures)
    return f"node at fault: {', '.join(bad)}" if bad else None


def bad_nodes(failures: Sequence[Failure]) -> list[str]:
    """Nodes whose hardware is what the first failure speaks of."""
    first = failures[0] if failures else None
    return [first.node] if first is not None and first.node and _NODE_FAULT.search(first.message) else []


def refusal(run_dir: Path, job_id: str, max_requeues: int) -> LaunchError | None:
    """Why a job is not started (again): too often, or it never gets anywhere. A preemption is not the job's doing."""
    starts = [start for start in job_starts.starts(run_dir) if start.job == job_id]
    if len(starts) > max_requeues:
        return LaunchError(
            f"job {job_id} was queued again {max_requeues} times", "raise --max-requeues, or submit it anew"
        )
    idle = [start for start in starts if start.reason not in NOT_ITS_DOING][-MAX_IDLE_STARTS:]
    if len(idle) == MAX_IDLE_STARTS and idle[0].step == job_starts.last_step(run_dir):
        ends = "; ".join(dict.fromkeys(start.ended for start in idle))
        return LaunchError(
            f"job {job_id} made no step in {MAX_IDLE_STARTS} starts, it stands at {idle[0].step}. They ended: {ends}",
            f"look at {run_dir}/logs, mend the cause, and submit it anew with run.resume=true",
        )
    return None


def queue_again(job_id: str, without: Iterable[str] = (), restart: int = 0) -> str:
    """Hand the job back to Slurm, unless Slurm took it; it ends this script with SIGTERM. What to tell the user.

    The nodes can be excluded only while the job waits, which it does for a while after it was requeued.

    Raises:
        LaunchError: Slurm refuses.
    """
    nodes = list(without)
    now = outlook(job_id)
    before = now.excluded
    if now.restarts > restart:
        return "Slurm has queued it again"
    done = commands.ask("scontrol", "requeue", job_id, timeout_s=60)
    if done.returncode:
        raise LaunchError(
            f"scontrol requeue {job_id} refused: {' '.join(done.stderr.split())}",
            "submit the job again with run.resume=true; the checkpoint is kept",
        )
    if not nodes:
        return "queued again"
    excluded = ",".join(filter(None, [before, *nodes]))
    done = commands.ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={excluded}")
    if done.returncode:
        return f"queued again; Slurm did not let it exclude {excluded}: {' '.join(done.stderr.split())}"
    return f"queued again without {excluded}"
