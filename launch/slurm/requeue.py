"""Decide whether a job goes back to the queue, without its faulty nodes."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ...errors import LaunchError
from ..failures import exit_codes, job_starts
from ..failures.failure import Failure, tasks_in
from . import commands

MAX_IDLE_STARTS = 3
"""A job is not restarted after this many starts in a row that ended by themselves without one optimizer step."""
PREEMPTED_BY_SLURM = "preempted"
TAKEN_BACK = "taken back by Slurm"
CANCELLED = "cancelled"
TIME_LIMIT = "its time limit"
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
    "TIMEOUT": TIME_LIMIT,
    "TIME LIMIT": TIME_LIMIT,
    "CANCELLED": CANCELLED,
    "OUT_OF_MEMORY": "out of memory by its cgroup's record",
}
"""State names of sacct and slurmstepd → how a start ended."""
# slurmstepd's words in the job's output; a user's cancel is the one without a reason.
_KILLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (\S+) (?:DUE TO ([A-Z ]*[A-Z]))?")
_ENDING_STATES = ("COMPLETING", "CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED")

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
    """Slurm's plans for a job."""

    # the end of its time limit in seconds since the epoch; None without a limit, and for a job that Slurm is ending,
    # whose end it sets to that moment
    ends_at: float | None = None
    preempted: bool = False  # whether Slurm has begun to preempt it
    excluded: str = ""  # nodes that it will not run on, in Slurm's list format
    restarts: int = 0  # how often it was requeued; more than the job itself knows of once Slurm has requeued it
    state: str = "RUNNING"  # Slurm's JobState; empty if Slurm does not answer
    reason: str = "None"  # Slurm's Reason of that state

    @property
    def is_ending(self) -> bool:
        """Whether Slurm has begun to end the job's processes."""
        return self.state in _ENDING_STATES


@dataclass(frozen=True)
class Ending:
    """How Slurm ends a start of a job."""

    how: str  # in words, for the record of starts
    comes_back: bool = False  # whether the job belongs back into the queue: Slurm preempts it, or has requeued it
    kills: bool = True  # whether Slurm has begun to end its processes, and has sent them SIGTERM


def outlook(job_id: str) -> Outlook:
    """Ask Slurm about a job; an outlook without a state if it does not answer."""
    shown = commands.ask("scontrol", "show", "job", job_id, "-o").stdout
    fields = dict(re.findall(r"(?:^| )(JobState|Reason|EndTime|PreemptTime|ExcNodeList|Restarts)=(\S*)", shown))
    state, end, excluded = fields.get("JobState", ""), fields.get("EndTime", ""), fields.get("ExcNodeList", "")
    has_limit = end[:4].isdigit() and state not in _ENDING_STATES
    return Outlook(
        ends_at=datetime.fromisoformat(end).timestamp() if has_limit else None,
        preempted=fields.get("PreemptTime", "")[:1].isdigit(),
        excluded="" if excluded == "(null)" else excluded,
        restarts=int(fields.get("Restarts", "0")),
        state=state,
        reason=fields.get("Reason", "None"),
    )


def end_by_slurm(job_id: str, restart: int, since: str) -> str | None:
    """How a start ended, from Slurm's accounting, else from its messages in the job's output; None if unknown. `since`:
    the start time, in Slurm's format."""
    arguments = ("--jobs", job_id, "--duplicates", "--allocations", "--noheader", "--parsable2", "--format=Start,State")
    process = commands.ask("sacct", *arguments)
    starts = sorted(line.split("|") for line in process.stdout.splitlines() if line.count("|") == 1)
    if process.returncode == 0 and len(starts) > restart:
        end = _ENDS.get(starts[restart][1].partition(" ")[0])
        if end is not None:
            return end
    endings = _announced_endings(job_id, since)
    return endings[-1] if endings else None


def _announced_endings(job_id: str, since: str) -> list[str]:
    """The endings that slurmstepd announced in the job's output since a time in Slurm's format, in order."""
    path = re.search(r"^\s*StdErr=(.*)$", commands.ask("scontrol", "show", "job", job_id).stdout, re.MULTILINE)
    text = ""
    # The file that scontrol names, else this process's own stderr: scontrol garbles a path that holds a %.
    for name in [*([path[1]] if path else []), "/proc/self/fd/2"]:
        with suppress(OSError):  # not there, or no file
            if Path(name).is_file():
                text = Path(name).read_text(errors="replace")
                break
    announced = [reason or CANCELLED.upper() for when, reason in _KILLED.findall(text) if when >= since]
    return [_ENDS[reason] for reason in announced if reason in _ENDS]


def was_cancelled(job_id: str) -> bool:
    """Whether slurmstepd announced a user's cancel of this start, whatever has become of the job since."""
    return CANCELLED in _announced_endings(job_id, _BEGAN)


def kill_wait_s() -> int | None:
    """Seconds between SIGTERM and SIGKILL of a job that Slurm ends; None if Slurm does not answer."""
    match = re.search(r"^KillWait\s*=\s*(\d+)", commands.ask("scontrol", "show", "config").stdout, re.MULTILINE)
    return int(match[1]) if match else None


def ending(job_id: str, restart: int) -> Ending | None:
    """How Slurm is ending this start of a job, or has ended it; None while it lets the job run. The job's state comes
    first: for a job that was cancelled, neither a preemption nor a time limit counts any more."""
    now = outlook(job_id)
    if now.restarts > restart:
        return Ending(end_by_slurm(job_id, restart, _BEGAN) or TAKEN_BACK, comes_back=True)
    if now.state and not now.is_ending:
        return Ending(PREEMPTED_BY_SLURM, comes_back=True, kills=False) if now.preempted else None
    announced = _announced_endings(job_id, _BEGAN)
    if now.reason == "TimeLimit":
        return Ending(TIME_LIMIT)
    if announced:
        return Ending(announced[-1], comes_back=announced[-1] in NOT_ITS_DOING)
    return Ending(CANCELLED) if now.state else None


def reason(
    end: Ending | None,
    came: Sequence[signal.Signals],
    failures: Sequence[Failure],
    stopped: bool,
    saved: int | None,
    lost: str | None = None,
) -> str | None:
    """Why a job that nobody cancelled should be requeued; None if it should not.

    USR2 comes only from Slurm: before the time limit, or at a preemption. TERM may have any sender: then only
    Slurm's own record of a preemption counts, or a requeue that Slurm has already made (its only trace without a
    GraceTime). A step that died unsaved is requeued at a preemption, and resumes from its last checkpoint. After USR2
    this start must have made a checkpoint: without one the next start would get no further.

    `end`: how Slurm ends this start. `saved`: the step of the newest checkpoint, if this start made it. `lost`: names
    processes that died without a word; such a job is requeued as if Slurm had lost their node.
    """
    was_warned = signal.SIGUSR2 in came
    if was_warned and stopped and saved is not None:
        return "saved after USR2"
    slurm_reason = end.how if end is not None and end.comes_back else None
    if failures and failures[0].exit_code == exit_codes.UNSAVED:
        goes_on = saved is not None and (was_warned or slurm_reason is not None)
        return f"the last save failed, continues from step {saved}" if goes_on else None
    if slurm_reason is not None and not any(failure.is_error and not failure.lost_peer for failure in failures):
        return slurm_reason
    bad = bad_nodes(failures)
    return f"node at fault: {', '.join(bad)}" if bad else lost


def bad_nodes(failures: Sequence[Failure]) -> list[str]:
    """The node whose hardware the first failure blames, if any."""
    origin = failures[0] if failures else None
    return [origin.node] if origin is not None and origin.node and _NODE_FAULT.search(origin.message) else []


def script_reason(
    end: Ending | None, came: Sequence[signal.Signals], failures: Sequence[Failure], code: int, saved: bool,
    lost: str | None = None,
) -> str | None:  # fmt: skip
    """Why the job of a script that nobody cancelled should be requeued; None if it should not.

    A script that was told of USR2 ends with 0, 75 or by a signal, or has saved: whether it has finished its work only
    its next start can tell. Slurm's own record of a preemption or a requeue counts whatever the script's last words.

    `code`: the step's exit code. `saved`: whether this start wrote a checkpoint. `lost`: names processes that died
    without a word.
    """
    if end is not None and end.comes_back:
        return end.how
    ended = exit_codes.signal_of(code)
    as_told = code in (exit_codes.OK, exit_codes.PREEMPTED) or (ended is not None and ended.name in _TELLING)
    if signal.SIGUSR2 in came and (saved or as_told):
        return "saved after USR2" if saved else "stopped after USR2"
    bad = bad_nodes(failures)
    return f"node at fault: {', '.join(bad)}" if bad else lost


def refusal(
    run_dir: Path, job_id: str, max_requeues: int, now: int | None = None, idle_words: str | None = None
) -> LaunchError | None:
    """Why a job must not start again: too many requeues, or no progress. A preemption is not the job's fault.

    `now`: the job's progress, as its starts recorded it; default: the run's step. `idle_words`: says for a script that
    it made no progress.
    """
    starts = [start for start in job_starts.starts(run_dir) if start.job == job_id]
    if len(starts) > max_requeues:
        return LaunchError(
            f"job {job_id} was queued again {max_requeues} times", "raise --max-requeues, or submit the job again"
        )
    idle = [start for start in starts if start.reason not in NOT_ITS_DOING][-MAX_IDLE_STARTS:]
    if len(idle) == MAX_IDLE_STARTS and idle[0].step == (job_starts.last_step(run_dir) if now is None else now):
        ends = "; ".join(dict.fromkeys(start.ended for start in idle))
        cause = f"job {job_id} {idle_words or 'made no step'} in {MAX_IDLE_STARTS} starts"
        cause += "" if idle_words else f": it is still at {idle[0].step}"
        fix = f"look at {run_dir}/logs, fix the cause, and submit the job again"
        return LaunchError(f"{cause}. They ended: {ends}", fix + ("" if idle_words else " with run.resume=true"))
    return None


def queue_again(job_id: str, without: Iterable[str] = (), restart: int = 0) -> str:
    """Requeue the job unless Slurm has; Slurm then ends this script with SIGTERM. Returns a message for the user. Nodes
    can be excluded only while the job waits, as it does for a while after a requeue."""
    nodes, now = list(without), outlook(job_id)
    if now.restarts > restart:
        return "Slurm has queued it again"
    process = commands.ask("scontrol", "requeue", job_id, timeout_s=60)
    if process.returncode:
        raise LaunchError(
            f"scontrol requeue {job_id} refused: {' '.join(process.stderr.split())}",
            "submit the job again with run.resume=true; the checkpoint is kept",
        )
    if not nodes:
        return "queued again"
    excluded = ",".join(filter(None, [now.excluded, *nodes]))
    process = commands.ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={excluded}")
    if process.returncode:
        return f"queued again; Slurm did not let it exclude {excluded}: {' '.join(process.stderr.split())}"
    return f"queued again without {excluded}"


_ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): ", re.MULTILINE)
_NO_STEP = re.compile(
    r"missing step on node|Cannot communicate with node|io error with slurmstepd"
    r"|Timed out waiting for job step to complete"
)
_SLACK_S = 30.0  # beyond Slurm's KillWait, after which no task of an ended step is left
_DEFAULT_KILL_WAIT_S = 30
_LOOK_S = 2.0


class Bound:
    """Bounds how long srun may wait for tasks once the first of them has failed. `srun_log` reads srun's output."""

    def __init__(self, srun_log: Callable[[], str]) -> None:
        self._srun_log = srun_log
        self._next_look = 0.0
        self._deadline: float | None = None

    def is_passed(self) -> bool:
        """Whether tasks that should have ended long ago are missing; call it often."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        if self._deadline is None and ended_tasks(self._srun_log()):
            wait_s = kill_wait_s()
            self._deadline = now + _SLACK_S + (_DEFAULT_KILL_WAIT_S if wait_s is None else wait_s)
        return self._deadline is not None and now > self._deadline


def ended_tasks(srun_log: str) -> set[int]:
    """The tasks whose failed end srun reports."""
    return {task for tasks in _ENDED.findall(srun_log) for task in tasks_in(tasks)}


def lost_processes(
    srun_log: str, was_bounded: bool, failures: Iterable[Failure], nodes: str, n_nodes: int, ranks_per_node: int,
    tasks_per_node: int,
) -> str | None:  # fmt: skip
    """Names the nodes and ranks whose processes died without a word; None if the job ended for another reason.

    `was_bounded`: whether srun was ended because it waited for tasks in vain. `failures`: of the other ranks; each has
    to be a consequence of a lost peer. `nodes`: the job's nodes, in Slurm's list format.
    """
    if not was_bounded and not _NO_STEP.search(srun_log):
        return None
    if not all(failure.lost_peer or exit_codes.signal_of(failure.exit_code) for failure in failures):
        return None
    silent = set(range(n_nodes * tasks_per_node)) - ended_tasks(srun_log)
    if not silent:
        return None
    lost = sorted({task // tasks_per_node for task in silent})
    hosts = commands.ask("scontrol", "show", "hostnames", nodes).stdout.split()
    names = [hosts[node] if node < len(hosts) else f"node {node}" for node in lost]
    ranks = [
        str(rank)
        for node in lost
        for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node)
        if tasks_per_node == 1 or rank in silent
    ]
    return f"processes on {', '.join(names)} died without a word (rank {', '.join(ranks)})"
