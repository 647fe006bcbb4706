"""Decide whether a job goes back to the queue, without its faulty nodes."""

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
"""A job is not restarted after this many starts in a row that ended by themselves without one optimizer step."""
PREEMPTED_BY_SLURM = "preempted"
TAKEN_BACK = "taken back by Slurm"
NOT_ITS_DOING = (PREEMPTED_BY_SLURM, TAKEN_BACK)
"""Ends that the job did not cause."""
_TELLING = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # signals that tell a script of a preemption
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
"""State names of sacct and slurmstepd → how a start ended."""
_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (\S+) DUE TO ([A-Z ]*[A-Z])")

# Messages of CUDA, NCCL and the kernel about a faulty machine: another start there would fail as well.
_NODE_FAULT = re.compile(
    r"uncorrectable ECC|uncorrectable NVLink|fallen off the bus|Xid|GPU is lost|hardware stack error"
    r"|CUDA driver initialization failed|system not yet initialized"
    r"|CUDA-capable device\(s\) is/are busy or unavailable",
    re.IGNORECASE,
)


_BEGAN = time.strftime("%Y-%m-%dT%H:%M:%S")  # this process is one start of the job


@dataclass(frozen=True)
class Outlook:
    """Slurm's plans for a job.

    Attributes:
        ends_at: the end of its time limit in seconds since the epoch; None without a limit.
        preempted: whether Slurm is preempting it.
        excluded: nodes that it will not run on, in Slurm's list format.
        restarts: how often it was requeued; more than the job itself knows of once Slurm has requeued it.
    """

    ends_at: float | None = None
    preempted: bool = False
    excluded: str = ""
    restarts: int = 0


def outlook(job_id: str) -> Outlook:
    """Ask Slurm about a job; an empty outlook if it does not answer."""
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
    """How a start ended, from Slurm's accounting, else from its messages in the job's output; None if unknown.

    Args:
        since: the start time, in Slurm's format.
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
    """Why Slurm is taking a running job off its nodes, or has done so; None if it is not."""
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
    """Why the job should be requeued; None if it should not.

    USR2 comes only from Slurm: before the time limit, or at a preemption. TERM may be a user's scancel: then only
    Slurm's own record of a preemption counts, or a requeue that Slurm has already made (its only trace without a
    GraceTime). A step that died unsaved is requeued at a preemption, and resumes from its last checkpoint. After USR2
    this start must have made a checkpoint: without one the next start would get no further.

    Args:
        saved: the step of the newest checkpoint, if this start made it.
    """
    told = signal.SIGUSR2 in came
    if told and stopped and saved is not None:
        return "saved after USR2"
    why = taken_back(job_id, restart)
    if failures and failures[0].exit_code == exit_codes.UNSAVED:
        goes_on = saved is not None and (told or why is not None)
        return f"the last save failed, continues from step {saved}" if goes_on else None
    if why is not None and not any(found.is_error and not found.lost_peer for found in failures):
        return why
    bad = bad_nodes(failures)
    return f"node at fault: {', '.join(bad)}" if bad else None


def bad_nodes(failures: Sequence[Failure]) -> list[str]:
    """The node whose hardware the first failure blames, if any."""
    first = failures[0] if failures else None
    return [first.node] if first is not None and first.node and _NODE_FAULT.search(first.message) else []


def script_reason(
    job_id: str, came: Sequence[signal.Signals], failures: Sequence[Failure], code: int, saved: bool, restart: int
) -> str | None:
    """Why the job of a script should be requeued; None if it should not.

    A script that was told of USR2 ends with 0, 75 or by a signal, or has saved: whether it has finished its work only
    its next start can tell. Slurm's own record of a preemption or a requeue counts whatever the script's last words.

    Args:
        code: the step's exit code.
        saved: whether this start wrote a checkpoint.
    """
    why = taken_back(job_id, restart)
    if why is not None:
        return why
    ended = exit_codes.signal_of(code)
    as_told = code in (exit_codes.OK, exit_codes.PREEMPTED) or (ended is not None and ended.name in _TELLING)
    if signal.SIGUSR2 in came and (saved or as_told):
        return "saved after USR2" if saved else "stopped after USR2"
    bad = bad_nodes(failures)
    return f"node at fault: {', '.join(bad)}" if bad else None


def refusal(
    run_dir: Path, job_id: str, max_requeues: int, now: int | None = None, idle_words: str | None = None
) -> LaunchError | None:
    """Why a job must not start again: too many requeues, or no progress. A preemption is not the job's fault.

    Args:
        now: the job's progress, as its starts recorded it; default: the run's step.
        idle_words: says for a script that it made no progress.
    """
    starts = [start for start in job_starts.starts(run_dir) if start.job == job_id]
    if len(starts) > max_requeues:
        return LaunchError(
            f"job {job_id} was queued again {max_requeues} times", "raise --max-requeues, or submit the job again"
        )
    idle = [start for start in starts if start.reason not in NOT_ITS_DOING][-MAX_IDLE_STARTS:]
    if len(idle) == MAX_IDLE_STARTS and idle[0].step == (job_starts.last_step(run_dir) if now is None else now):
        ends = "; ".join(dict.fromkeys(start.ended for start in idle))
        if idle_words is not None:
            return LaunchError(
                f"job {job_id} {idle_words} in {MAX_IDLE_STARTS} starts. They ended: {ends}",
                f"look at {run_dir}/logs, fix the cause, and submit the job again",
            )
        return LaunchError(
            f"job {job_id} made no step in {MAX_IDLE_STARTS} starts: it is still at {idle[0].step}. They ended: {ends}",
            f"look at {run_dir}/logs, fix the cause, and submit the job again with run.resume=true",
        )
    return None


def queue_again(job_id: str, without: Iterable[str] = (), restart: int = 0) -> str:
    """Requeue the job unless Slurm has; Slurm then ends this script with SIGTERM. Returns a message for the user.

    Nodes can be excluded only while the job waits, as it does for a while after a requeue.

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
