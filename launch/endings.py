"""The end of one start of a batch job: why it ended, what is saved, and whether the job goes back to the queue."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .failures import exit_codes, failure, oom
from .ranks.placement import integer
from .slurm import lost, preemption_warning, requeue
from .slurm.preemption_warning import PreemptionWarning, say

if TYPE_CHECKING:
    from .batch import Batch

SRUN_LOG = "srun.log"
"""srun's own output, in the start's folder."""
_BEGAN = time.time()  # this process is one start of the job


def note_ending(batch: Batch, ending: requeue.Ending, told_at: float | None) -> None:
    """Print and record how Slurm is ending this start, while the ranks may still save."""
    reason = ending.how
    if ending.how == requeue.TIME_LIMIT:
        reason = _late_save(batch, told_at)
        say(reason)
    elif ending.how == requeue.CANCELLED:
        say("cancelled: the ranks are told to save; the job will not be queued again")
    batch.note_end(reason)


def queue_once_saved(batch: Batch, before: tuple[int, int] | None) -> bool:
    """After the time limit: queue the job again as soon as its save is complete, which may be the last moment.

    Args:
        before: the newest checkpoint of earlier starts.
    """
    if batch.script is not None or batch.newest_checkpoint() in (None, before):
        return False
    batch.note_end("saved after USR2")
    refuse(batch, os.environ)
    say(f"saved within the time after the limit: {requeue.queue_again(batch.job_id, (), batch.restart)}")
    return True


def _late_save(batch: Batch, told_at: float | None) -> str:
    """A line about a save that meets the time limit: the time that it had and needs, and the newest checkpoint."""
    warning_time = "the ranks were not told to save before it"
    if told_at is not None:
        warning_time = f"the ranks were told to save {time.time() - told_at:.0f} s before it"
    kill_wait_s = requeue.kill_wait_s()
    warning_time += "" if kill_wait_s is None else f" and have {kill_wait_s} s after it (Slurm's KillWait)"
    longest_s = None if batch.script is not None else preemption_warning.longest_save_s(batch.run_dir)
    needed = "no earlier save was timed" if longest_s is None else f"the longest save so far took {longest_s:.1f} s"
    return f"{requeue.TIME_LIMIT}: {warning_time}; {needed}; {_newest_words(batch)}"


def _newest_words(batch: Batch) -> str:
    newest = batch.newest_checkpoint()
    if newest is None:
        return "nothing is saved"
    return f"saved last: step {newest[0]}" if batch.script is None else "the script has earlier checkpoints"


def refuse(batch: Batch, environ: Mapping[str, str]) -> None:
    """Raise the error of a job that should not run again: too many starts, or no progress."""
    most = integer(environ, "SHARDKIT_MAX_REQUEUES") if environ.get("SHARDKIT_MAX_REQUEUES") else 100
    words = None
    if batch.script is not None:
        words = f"wrote no file below {batch.script.checkpoints}"
        words = words if batch.script.checkpoints else "showed no progress (it was submitted without --checkpoints)"
    problem = requeue.refusal(batch.run_dir, batch.job_id, most, batch.progress(), words)
    if problem is not None:
        raise problem


def after(
    batch: Batch, code: int, warning: PreemptionWarning, environ: Mapping[str, str], saved: tuple[int, int] | None,
    was_bounded: bool = False,
) -> int:  # fmt: skip
    """Note why the step ended; requeue the job, or end it with the returned code.

    Args:
        saved: the newest checkpoint, if this start made it.
        was_bounded: whether srun was ended because it waited for tasks in vain.
    """
    failures = _failures(batch)
    stopped = any(rank_failure.exit_code == exit_codes.PREEMPTED for rank_failure in failures)
    may_be_done = code == 0 and not stopped
    ending = None
    if not may_be_done or (batch.script is not None and warning.came):
        ending = requeue.ending(batch.job_id, batch.restart)
    if ending is not None and ending.how == requeue.CANCELLED:
        if ending.comes_back:  # Slurm had begun to queue it again
            requeue.cancel(batch.job_id)
        return _cancelled(batch, code, failures, saved is not None)
    if may_be_done and (batch.script is None or signal.SIGUSR2 not in warning.came):
        batch.note_end("done")
        return exit_codes.OK
    tasks_per_node = 1 if batch.style == "torchrun" else batch.n_ranks_per_node
    gone = lost.reason(
        srun_log(batch), was_bounded, failures, environ.get("SLURM_JOB_NODELIST", ""), batch.n_nodes,
        batch.n_ranks_per_node, tasks_per_node,
    )  # fmt: skip
    if batch.script is None:
        requeue_reason = requeue.reason(ending, warning.came, failures, stopped, saved and saved[0], gone)
    else:
        requeue_reason = requeue.script_reason(ending, warning.came, failures, code, saved is not None, gone)
        stopped = stopped or (requeue_reason is not None and requeue_reason.endswith("after USR2"))
    if requeue_reason is None and ending is not None and ending.how == requeue.TIME_LIMIT and not stopped:
        return _out_of_time(batch, code, failures, warning.told_at)
    if requeue_reason is None:
        return _failed(batch, code, failures, stopped, saved is not None)
    if requeue_reason == gone:
        say(f"{requeue_reason}; Slurm has not declared the node lost")
    batch.note_end(requeue_reason)
    if not stopped and requeue_reason not in requeue.NOT_ITS_DOING:
        _explain(batch, failures)
    refuse(batch, environ)
    say(f"{requeue_reason}: {requeue.queue_again(batch.job_id, requeue.bad_nodes(failures), batch.restart)}")
    warning.wait_for_term()
    if requeue.was_cancelled(batch.job_id):  # after the look above, and before the requeue
        requeue.cancel(batch.job_id)
        return _cancelled(batch, code, failures, saved is not None)
    return exit_codes.PREEMPTED


def _cancelled(batch: Batch, code: int, failures: list[failure.Failure], saved: bool) -> int:
    """End a cancelled job for good, whatever warning came before; returns the exit code."""
    batch.note_end(requeue.CANCELLED)
    if any(rank_failure.exit_code == exit_codes.PREEMPTED for rank_failure in failures) and saved:
        say(f"cancelled, not queued again; {_newest_words(batch)}; continue with run.resume=true")
        return exit_codes.PREEMPTED
    if any(rank_failure.is_error and not rank_failure.lost_peer for rank_failure in failures):  # such as a full disk
        _explain(batch, failures)
    if batch.script is not None:
        written = "wrote a checkpoint in this start" if saved else "wrote no checkpoint in this start"
        say(f"cancelled, not queued again; the script {written}")
    else:
        say(f"cancelled, not queued again; the ranks ended without a save; {_newest_words(batch)}")
    return exit_codes.shell_code(code)


def _out_of_time(batch: Batch, code: int, failures: list[failure.Failure], told_at: float | None) -> int:
    """Report ranks that the time limit ended before they had saved; returns the exit code."""
    reason = _late_save(batch, told_at)
    batch.note_end(reason)
    if any(rank_failure.is_error and not rank_failure.lost_peer for rank_failure in failures):
        _explain(batch, failures)
    else:
        print(f"error: not saved in time: {reason}", file=sys.stderr)
        print(
            "  fix: raise --signal-s or --time, or save more often (checkpoint.every_minutes)",
            file=sys.stderr,
            flush=True,
        )
    return exit_codes.shell_code(code)


def _failed(batch: Batch, code: int, failures: list[failure.Failure], stopped: bool, saved: bool) -> int:
    if stopped and not saved:
        say(f"error: the ranks reported a save, but {batch.run_dir}/checkpoints has no checkpoint of this start")
        batch.note_end("stopped, without a checkpoint")
        return exit_codes.UNSAVED
    if stopped:
        say("saved and stopped; not queued again: only Slurm's warning or a preemption requeues a job")
        batch.note_end("stopped")
        return exit_codes.PREEMPTED
    batch.note_end(f"failed: {_cause(failures[0]) if failures else code}")
    if not failures:
        say(f"srun ended with {exit_codes.describe(code)}, no rank reported an error; logs: {batch.log_dir}")
        return exit_codes.shell_code(code)
    _explain(batch, failures)
    return failure.exit_code_of(failures)


def _explain(batch: Batch, failures: list[failure.Failure]) -> None:
    """Print why ranks failed. Under torchrun each node's launcher has printed it."""
    if failures and batch.style == "srun":
        memory = oom.words(failures, oom.read(batch.run_dir, _BEGAN))
        kills = failure.oom_kills_in_srun_log(srun_log(batch))
        print(failure.explain(failures, str(batch.log_dir), kills, memory), file=sys.stderr, flush=True)


def _cause(origin: failure.Failure) -> str:
    return origin.message if origin.trace or origin.is_error else f"rank {origin.rank}: {origin.message}"


def _failures(batch: Batch) -> list[failure.Failure]:
    """The failures of all ranks, likely origin first: from their own files, their launchers and srun."""
    if batch.style == "torchrun":
        launchers = [failure.of_launcher(folder) for folder in batch.log_dir.glob("*")]
        return sorted((entry for entries in launchers for entry in entries), key=lambda entry: entry.order)
    reported = failure.in_srun_log(srun_log(batch))
    if batch.script is not None:
        reported = [
            failure.with_traceback(rank_failure, batch.log_dir / f"rank-{rank_failure.rank}.log")
            for rank_failure in reported
        ]
    return failure.merged(failure.read(batch.error_dir.glob("*.json")), reported)


def srun_log(batch: Batch) -> str:
    try:
        return (batch.log_dir / SRUN_LOG).read_text(errors="replace")
    except OSError:  # the run was deleted
        return ""
