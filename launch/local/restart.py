"""A restarted job continues where it stopped, whatever its command line says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..failures import exit_codes, failure, job_starts
from ..ranks.placement import integer
from .torchrun import is_elastic


def is_restart(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun restarted these ranks, or Slurm requeued their job.

    In an elastic job every start counts as a restart: torchrun does not tell a joining node about earlier starts.
    """
    environ = os.environ if environ is None else environ
    if is_elastic(environ):
        return True
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(integer(environ, name) > 0 for name in names if name in environ)


def overrides(run_dir: str, resume: bool | str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Overrides for a restarted run: continue in its own directory, never delete it.

    A run that starts from another run's checkpoint, and has none of its own yet, starts from there again. Nothing is
    set if the earlier start ended before it claimed the directory: the files there are another run's.
    """
    environ = os.environ if environ is None else environ
    for key, job in (("slurm_job", environ.get("SLURM_JOB_ID")), ("torchrun", agent(environ))):
        if job is not None:
            if _settings_of(Path(run_dir)).get(key) != job:
                return []
            break
    has_own = job_starts.newest_checkpoint(Path(run_dir)) is not None
    if isinstance(resume, str) and not has_own:
        return ["run.overwrite=true"]
    return ["run.overwrite=false", "run.resume=true"]


def agent(environ: Mapping[str, str]) -> str | None:
    """The torchrun process that starts and restarts these ranks; None if several nodes have one each."""
    if "TORCHELASTIC_RUN_ID" not in environ or is_elastic(environ) or environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return None
    return f"{os.getppid()} on {os.uname().nodename}"


def _settings_of(run_dir: Path) -> dict[str, Any]:
    """The env.json of a directory's last start; empty if there is none."""
    try:
        found = json.loads((run_dir / "env.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def stopped(run_dir: str, signal_name: str, environ: Mapping[str, str] | None = None) -> int:
    """The exit code of a rank that saved and stopped on request; records the stop for the launcher."""
    environ = os.environ if environ is None else environ
    noted = failure.record_stop(exit_codes.PREEMPTED, signal_name, environ)
    if is_elastic(environ) and signal_name == "SIGTERM":
        # A node has most likely joined. This node's agent may not know yet: only a failure makes it restart its ranks.
        if environ.get("RANK") == "0":
            job_starts.note_restart(Path(run_dir), "saved for SIGTERM: a node joined, or a user ended the job")
        return exit_codes.PREEMPTED
    # The launcher reads the record: torchrun would treat 75 as a failure and end the other ranks.
    return exit_codes.OK if noted else exit_codes.PREEMPTED


class Restarts:
    """Follows a launcher's attempts and records why ranks were restarted."""

    def __init__(self, log_dir: Path, run_dir: Path) -> None:
        self._log_dir, self._run_dir = log_dir, run_dir
        self._known = 1

    def look(self) -> bool:
        """Record new restarts; returns whether a rank of the last attempt reported an error that no restart can fix."""
        attempts = failure.attempts(self._log_dir)
        while self._known < len(attempts):
            self._note(attempts[self._known - 1], self._known)
            self._known += 1
        found = failure.in_attempt(attempts[-1]) if attempts else []
        return any(one.exit_code in exit_codes.FINAL and not one.lost_peer for one in found)

    def _note(self, attempt: Path, number: int) -> None:
        try:
            text = (self._log_dir / failure.TORCHRUN_LOG).read_text(errors="replace")
        except OSError:
            text = ""
        ended = next(iter(failure.ended_in_torchrun_log(text)[number - 1 : number]), "a rank ended without a word")
        first = next(iter(failure.in_attempt(attempt)), None)
        silent = failure.silent_in(attempt)
        if first is None or (first.lost_peer and "killed by" in ended):  # a killed rank cannot record its error
            job_starts.note_restart(self._run_dir, ended)
        elif first.lost_peer and silent:  # torchrun saw the peer end first
            ranks = ", ".join(map(str, silent))
            job_starts.note_restart(self._run_dir, f"local rank {ranks}: ended without a word, most likely killed")
        else:
            job_starts.note_restart(
                self._run_dir, f"rank {first.rank}: {first.message.partition(chr(10))[0]}", first.lost_peer
            )
