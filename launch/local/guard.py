"""Look after the ranks of a script that knows nothing of shardkit: tell them of a preemption, end those that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from ..failures import failure
from ..script import PREEMPT_FILE, Script
from . import heartbeat, processes

SIGNALS = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "usr2": signal.SIGUSR2}
_POLL_S = 0.1
_LOOK_S = 0.5


class Guard:
    """Watches one node's ranks of a script.

    A preemption is announced by a file that the batch job writes, for all nodes at once, or by SIGUSR2 to this
    launcher. Each rank then gets its signal once; with `--on-preempt file` the file itself is the announcement.

    Attributes:
        preempted: whether the ranks were told that their job is preempted.
    """

    def __init__(self, script: Script, n_ranks: int, log_dir: Path, environ: Mapping[str, str]) -> None:
        self.preempted = False
        self._script = script
        self._log_dir = log_dir
        self._file = Path(environ.get(PREEMPT_FILE) or log_dir.absolute() / "preempted")
        self._beats = heartbeat.Heartbeats(script, n_ranks, log_dir) if script.heartbeat is not None else None
        self._attempts = 0
        self._signalled: set[int] = set()
        self._next_look = 0.0

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables for the ranks."""
        added = {PREEMPT_FILE: str(self._file)} if self._script.on_preempt == "file" else {}
        added |= {} if environ.get("PYTHONFAULTHANDLER") else {"PYTHONFAULTHANDLER": "1"}
        return added | ({} if self._beats is None else self._beats.variables())

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Take SIGUSR2 as the announcement of a preemption."""
        return processes.handling([signal.SIGUSR2], lambda *_: self._announce())

    def _announce(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the ranks of this node are told all the same
            self._file.touch()
        self.preempted = True

    def look(self, process: subprocess.Popen[bytes]) -> bool:
        """Pass a preemption on and end silent ranks; call it often.

        Returns True if torchrun restarts the ranks of a preempted job, which should then be stopped.
        """
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_S
        attempts = failure.attempts(self._log_dir)
        self.preempted = self.preempted or self._file_is_there()
        if self.preempted and self._signalled and len(attempts) > self._attempts:
            return True
        if len(attempts) != self._attempts:
            self._attempts = len(attempts)
            if self._beats is not None:
                self._beats.begin()
        if self.preempted:
            self._tell(process.pid)
        elif self._beats is not None and attempts and (quiet := self._beats.quiet()):
            heartbeat.end(process.pid, quiet, attempts[-1])
            self._beats.pause()
        return False

    def _file_is_there(self) -> bool:
        try:  # listing the folder refreshes NFS's cache of missing names
            return self._file.name in os.listdir(self._file.parent)
        except OSError:
            return False

    def _tell(self, torchrun: int) -> None:
        ranks = {pid for pid, _ in processes.ranks_of(torchrun).values()}
        number = SIGNALS.get(self._script.on_preempt)
        if number is not None:
            for pid in ranks - self._signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._signalled |= ranks

    def wind_down(self, process: subprocess.Popen[bytes]) -> None:
        """After SIGTERM to this launcher: tell the ranks, and give them time to end by themselves."""
        self._announce()
        self._next_look = 0.0
        deadline = time.monotonic() + self._script.grace_s
        ranks = processes.rank_processes(process.pid)
        while time.monotonic() < deadline and (process.poll() is None or not ranks.isdisjoint(processes.descendants())):
            if self.look(process):
                return
            time.sleep(_POLL_S)

    def ended_as_told(self, failures: list[failure.Failure]) -> int | None:
        """The signal that ended the ranks of a preempted job, if all that failed ended by it; None otherwise."""
        number = SIGNALS.get(self._script.on_preempt, signal.SIGTERM)
        codes = {rank_failure.exit_code for rank_failure in failures}
        return int(number) if codes and codes <= {-number, 128 + number, -signal.SIGTERM} else None
