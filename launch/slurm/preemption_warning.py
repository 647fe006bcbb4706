"""What tells a batch job to save: Slurm's signals, its own clock before the time limit, a preemption."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from . import lead, requeue, script

_LOOK_S = 30.0  # between two questions to Slurm's controller
_REPEAT_S = 3.0  # between two warnings: ranks that had not started yet did not get the one before
_POLL_S = 0.1


class Notice:
    """Notes what comes from its construction on, or came to the batch script before, and passes it on to the steps.

    Attributes:
        came: the signals, in order; USR2 also for a time limit or preemption that nobody signalled.
    """

    def __init__(self) -> None:
        self.came = [signal.SIGUSR2] if os.environ.get("SHARDKIT_WARNED") else []
        self._term_passed = False
        self._next_look = self._next_warning = 0.0
        self._ends_at: float | None = None
        self._told = lead.DEFAULT_S
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # the template blocks it

    def _note(self, number: int, _: FrameType | None) -> None:
        self.came.append(signal.Signals(number))

    def watch(self, job_id: str, run_dir: Path) -> None:
        """Look for a reason to save, and tell the ranks; to be called often."""
        now = time.time()
        if now >= self._next_look and signal.SIGUSR2 not in self.came:
            self._next_look = now + _LOOK_S
            self._look(job_id, run_dir, now)
        if self._ends_at is not None and now >= self._ends_at and signal.SIGUSR2 not in self.came:
            say("the time limit is near")
            self.came.append(signal.SIGUSR2)
        self._pass_on(job_id, now)

    def _look(self, job_id: str, run_dir: Path, now: float) -> None:
        outlook, needed = requeue.outlook(job_id), lead.needed_s(run_dir)
        if outlook.preempted:
            say("Slurm preempts this job")
            self.came.append(signal.SIGUSR2)
        if outlook.ends_at is None or needed is None:
            return
        self._ends_at = outlook.ends_at - needed
        if needed > self._told:
            self._told = 2 * needed
            say(f"warning: a save may take so long that this run has to be told {needed} s before its time limit")

    def _pass_on(self, job_id: str, now: float) -> None:
        """TERM once. USR2 again and again: agents ignore it, ranks save."""
        if signal.SIGUSR2 in self.came and now >= self._next_warning:
            if self._next_warning == 0:
                say("the ranks are told to save")
            self._next_warning = now + _REPEAT_S
            _signal_steps("USR2", job_id)
        if signal.SIGTERM in self.came and not self._term_passed:
            self._term_passed = True
            say("got SIGTERM: the ranks are told to save")
            _signal_steps("TERM", job_id)

    def wait_for_term(self, timeout_s: float = 120) -> None:
        """Until SIGTERM has come, with which Slurm ends a script whose job it took back."""
        deadline = time.monotonic() + timeout_s
        while signal.SIGTERM not in self.came and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _signal_steps(name: str, job_id: str) -> None:
    script.ask("scancel", f"--signal={name}", job_id)  # a step that is just ending cannot be signalled: that is no news


def say(text: str) -> None:
    """A line of the batch script's own in the job's output."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
