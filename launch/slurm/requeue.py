"""Whether a job goes back to the queue, without the nodes that let it down."""

from __future__ import annotations

import re
import signal
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

# What CUDA, NCCL and the kernel say when it is the machine that failed: another start there would fail as well.
_NODE_FAULT = re.compile(
    r"uncorrectable ECC|uncorrectable NVLink|fallen off the bus|Xid|GPU is lost|hardware stack error"
    r"|CUDA driver initialization failed|system not yet initialized"
    r"|CUDA-capable device\(s\) is/are busy or unavailable",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outlook:
    """What Slurm plans for a job.

    Attributes:
        ends_at: when its time limit ends it, seconds since the epoch; None without a limit.
        preempted: whether Slurm is taking it off its nodes.
        excluded: nodes that it will not run on, as Slurm writes lists.
    """

    ends_at: float | None = None
    preempted: bool = False
    excluded: str = ""


def outlook(job_id: str) -> Outlook:
    """Ask Slurm; an empty outlook where it does not answer."""
    shown = commands.ask("scontrol", "show", "job", job_id, "-o").stdout
    end = re.search(r" EndTime=(\d{4}-\S+)", shown)
    excluded = re.search(r" ExcNodeList=(\S+)", shown)
    return Outlook(
        ends_at=datetime.fromisoformat(end[1]).timestamp() if end else None,
        preempted=re.search(r" PreemptTime=\d", shown) is not None,
        excluded=excluded[1] if excluded and excluded[1] != "(null)" else "",
    )


def reason(
    job_id: str, came: Sequence[signal.Signals], failures: Sequence[Failure], stopped: bool, saved: int | None
) -> str | None:
    """Why the job should be queued again; None if it should not.

    USR2 comes from Slurm alone: before the time limit, or at a preemption. TERM may be a user's scancel, so that only
    Slurm's own note of a preemption counts. A step that died without having saved is queued again at a preemption, and
    resumes from its last checkpoint. After USR2 it has to stand on a checkpoint that this start made: without one the
    next start would come no further.

    Args:
        saved: the step of the newest checkpoint, if this start made it.
    """
    told = signal.SIGUSR2 in came
    if told and stopped and saved is not None:
        return "saved after USR2"
    preempted = outlook(job_id).preempted
    if failures and failures[0].exit_code == exit_codes.UNSAVED:
        goes_on = saved is not None and (told or preempted)
        return f"the last save failed, goes on from step {saved}" if goes_on else None
    if preempted and not any(found.is_error and not found.lost_peer for found in failures):
        return PREEMPTED_BY_SLURM
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
    idle = [start for start in starts if start.reason != PREEMPTED_BY_SLURM][-MAX_IDLE_STARTS:]
    if len(idle) == MAX_IDLE_STARTS and idle[0].step == job_starts.last_step(run_dir):
        ends = "; ".join(dict.fromkeys(start.ended for start in idle))
        return LaunchError(
            f"job {job_id} made no step in {MAX_IDLE_STARTS} starts, it stands at {idle[0].step}. They ended: {ends}",
            f"look at {run_dir}/logs, mend the cause, and submit it anew with run.resume=true",
        )
    return None


def queue_again(job_id: str, without: Iterable[str] = ()) -> str:
    """Hand the job back to Slurm, which ends this script with SIGTERM; what to tell the user.

    The nodes can be excluded only while the job waits, which it does for a while after it was requeued.

    Raises:
        LaunchError: Slurm refuses.
    """
    nodes = list(without)
    before = outlook(job_id).excluded if nodes else ""
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
