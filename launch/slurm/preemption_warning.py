"""Warn a batch job early enough to save: how early, and by Slurm's signals or its own clock."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ...files import TAIL, read_objects
from . import commands, requeue

DEFAULT_S = 120
"""Seconds of warning for a run that has saved nothing yet."""
_SLACK_S = 30  # for the warning to reach the ranks, and for Slurm to requeue the job
_USUAL = 0.95  # quantile of step times: the first step after a start may compile


def longest_save_s(run_dir: Path) -> float | None:
    """Seconds of the longest of a run's last saves; None if nothing was saved."""
    saves = read_objects(run_dir / "logs" / "checkpoints.jsonl", TAIL)
    return max((float(save["total_s"]) for save in saves if "total_s" in save), default=None)


def needed_s(run_dir: Path) -> int | None:
    """Seconds that a run needs for its end: twice the sum of a long step and its longest save, plus slack. Twice, since
    a background save may have to finish first, and disks have bad days. None if nothing was saved."""
    longest_s = longest_save_s(run_dir)
    if longest_s is None:
        return None
    rows = read_objects(run_dir / "metrics.jsonl", TAIL)
    steps = sorted(float(step["step_time_s"]) for step in rows if "step_time_s" in step)
    step = steps[int(_USUAL * (len(steps) - 1))] if steps else 0.0
    return _SLACK_S + math.ceil(2 * (longest_s + step))


def signal_s(option: int | None, run_dir: Path, source: str | None) -> int:
    """Seconds before the time limit at which Slurm should signal: as asked, else from the run that this one continues.
    Slurm's clock rounds this up to a minute early, never late."""
    if option is not None:
        return option
    earlier = [run_dir, *([Path(source), *Path(source).parents[:2]] if source is not None else [])]
    return max([DEFAULT_S, *(needed for path in earlier if (needed := needed_s(path)) is not None)])


_START_S = 60  # Slurm may signal that early; and processes must start, ranks must join
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_CLOCK = re.compile(r"(?:(\d+):(?=\d+:))?(\d+)(?::(\d+))?")


def limit_s(text: str) -> int | None:
    """Seconds of a time limit in Slurm's format (`90`, `90:30`, `4:00:00`, `2-0`, …). None for no limit, which is 0 in
    Slurm, and for any other word."""
    if days := _DAYS.fullmatch(text):
        count, hours, minutes, seconds = (int(part or 0) for part in days.groups())
        return ((24 * count + hours) * 60 + minutes) * 60 + seconds or None
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return (hours * 60 + minutes) * 60 + seconds or None
    return None


def doubts(left_s: float, lead_s: int | None, run_dir: Path, periodic: bool) -> list[str]:
    """Reasons why a job may lose its work at its time limit. `lead_s`: seconds before it at which Slurm warns, None if
    only sbatch knows; long saves make it earlier."""
    needed = needed_s(run_dir)
    told_s = max(lead_s or 0, needed or 0)
    reasons = []
    if left_s - told_s < _START_S:
        if told_s:
            leaves = (
                f"{left_s:.0f} s, and the job is told to save {told_s} s before it: "
                f"{max(0.0, left_s - told_s):.0f} s to start and to train; ask for more time, or set --signal-s"
            )
        else:
            leaves = f"{left_s:.0f} s to start, to train and to save; ask for more time"
        reasons.append(f"the time limit leaves {leaves}")
    if needed is None and not periodic:
        lead = f"the {min(left_s, told_s):.0f} s before" if told_s else "what --signal leaves before"
        reasons.append(
            f"no save was timed yet, and no checkpoint is made on the way: if the first save takes longer than "
            f"{lead} the time limit, everything is lost; set checkpoint.every_minutes"
        )
    return reasons


_LOOK_S = 30.0  # between two queries to Slurm's controller
_REPEAT_S = 3.0  # between two warnings: ranks that had not started missed the earlier one
_POLL_S = 0.1


class PreemptionWarning:
    """Records signals to this process, or earlier to the batch script, and passes them on to the steps."""

    def __init__(self) -> None:
        # tells the ranks of a script, once, that their job is preempted; None = USR2 to the steps, repeatedly
        self.announce: Callable[[], None] | None = None
        # when the ranks were first told to save, in seconds since the epoch; None if they were not
        self.told_at: float | None = None
        # how Slurm was ending the job when SIGTERM came; None if it was not, or SIGTERM has not come
        self.ending: requeue.Ending | None = None
        # the signals, in order; USR2 also stands for a time limit or preemption without a signal
        self.came = [signal.SIGUSR2] if os.environ.get("SHARDKIT_WARNED") else []
        self._term_passed = False
        self._next_look = self._next_warning = 0.0
        self._ends_at: float | None = None
        self._announced_s = DEFAULT_S
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda came, _: self.came.append(signal.Signals(came)))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # the template blocks it

    @property
    def is_late(self) -> bool:
        """Whether the time limit came after the ranks were told to save."""
        return self.told_at is not None and self.ending is not None and self.ending.how == requeue.TIME_LIMIT

    def watch(self, job_id: str, run_dir: Path, restart: int = 0) -> None:
        """Check for a reason to save, and tell the ranks; call it often."""
        now = time.time()
        if now >= self._next_look and signal.SIGUSR2 not in self.came:
            self._next_look = now + _LOOK_S
            self._look(job_id, run_dir)
        if self._ends_at is not None and now >= self._ends_at and signal.SIGUSR2 not in self.came:
            say("the time limit is near")
            self.came.append(signal.SIGUSR2)
        # TERM is sent once, USR2 repeatedly: agents ignore it, ranks save.
        if signal.SIGUSR2 in self.came and now >= self._next_warning:
            if self._next_warning == 0:
                self.told_at = now
                say("the ranks are told to save")
            if self.announce is None:
                self._next_warning = now + _REPEAT_S
                signal_steps("USR2", job_id)
            else:
                self._next_warning = math.inf
                self.announce()
        if signal.SIGTERM in self.came and not self._term_passed:
            self._term_passed = True
            self.ending = requeue.ending(job_id, restart)
            if self.ending is None or not self.ending.kills:  # Slurm has sent it to this script alone
                say("got SIGTERM: the ranks are told to save")
                signal_steps("TERM", job_id)

    def _look(self, job_id: str, run_dir: Path) -> None:
        outlook, needed = requeue.outlook(job_id), needed_s(run_dir)
        if outlook.is_ending:  # SIGTERM is on its way to every process of the job
            self._ends_at = None
            return
        if outlook.preempted:
            say("Slurm is preempting this job")
            self.came.append(signal.SIGUSR2)
        if outlook.ends_at is None or needed is None:
            return
        self._ends_at = outlook.ends_at - needed
        if needed > self._announced_s:
            self._announced_s = 2 * needed
            say(f"warning: saves may take long: this run is told to save {needed} s before its time limit")

    def wait_for_term(self) -> None:
        """Wait for the SIGTERM with which Slurm ends the script of a requeued job, for two minutes at most."""
        deadline = time.monotonic() + 120
        while signal.SIGTERM not in self.came and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def signal_steps(name: str, job_id: str) -> None:
    """Send a signal to every process of a job's steps, but not to its batch script."""
    commands.ask("scancel", f"--signal={name}", job_id)  # fails for a step that is just ending, which does not matter


def say(text: str) -> None:
    """Print a line of the batch script to the job's output."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
