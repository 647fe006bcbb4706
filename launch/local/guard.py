"""Look after the ranks of a script that knows nothing of shardkit: tell them of a preemption, end those that hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import LaunchError, system_errors
from ..failures import failure
from ..script import AUTO, HEARTBEAT, PREEMPT_FILE, Script
from . import processes

FIRST_S = 600.0
"""The first heartbeat of a start may take this long if `--heartbeat-timeout` is shorter: imports, compilation."""
_GAP_S = 2.0  # a longer pause between two looks: this process itself was suspended
_TOGETHER_S = 2.0  # ranks whose last heartbeats lie no further apart fell silent together
_END_S = 5.0  # for a rank to write its stacks


@dataclass
class _Watched:
    path: Path
    stamp: int | None  # st_mtime_ns; None = no file
    quiet_s: float = 0.0
    began: bool = False


class Heartbeats:
    """The heartbeat files of one node's ranks.

    A rank that removes its file has finished, and is not watched until the file is back. A file's time stamp counts as
    different or the same and as nothing else: the clocks of the ranks, of a file server and of this process may differ.
    Time in which this process was suspended does not count.
    """

    def __init__(self, script: Script, n_ranks: int, log_dir: Path, clock: Callable[[], float] = time.monotonic):
        self.folder = log_dir / "heartbeat"
        self._template = str(self.folder / "{local_rank}") if script.heartbeat == AUTO else str(script.heartbeat)
        self._timeout_s = script.heartbeat_timeout_s
        self._n_ranks = n_ranks
        self._clock = clock
        self._looked: float | None = None
        self._watched: dict[int, _Watched] = {}

    def variables(self) -> dict[str, str]:
        """The variable that tells ranks where to touch their files; none if the user chose the files."""
        if self._template != str(self.folder / "{local_rank}"):
            return {}
        with system_errors(LaunchError, f"cannot make {self.folder}", "free space there"):
            self.folder.mkdir(parents=True, exist_ok=True)
        return {HEARTBEAT: str(self.folder)}

    def begin(self) -> None:
        """Start counting anew, for a new start of the ranks: files of an earlier one are no heartbeats."""
        self._looked = None
        paths = {rank: Path(self._template.replace("{local_rank}", str(rank))) for rank in range(self._n_ranks)}
        self._watched = {rank: _Watched(path, _stamp(path)) for rank, path in paths.items()}

    def pause(self) -> None:
        """Watch nothing until the next start."""
        self._watched = {}

    def quiet(self) -> dict[int, str]:
        """Local rank → what is wrong with it, for ranks that are silent for too long.

        A rank that hangs silences those that wait for it, moments before or after: all are told of at once, so that
        their stacks show which of them waits.
        """
        now = self._clock()
        passed = 0.0 if self._looked is None else min(now - self._looked, _GAP_S)
        self._looked = now
        problems, over_s = {}, {}
        for rank, watched in self._watched.items():
            stamp = _stamp(watched.path)
            if stamp != watched.stamp or (stamp is None and watched.began):
                watched.stamp, watched.quiet_s, watched.began = stamp, 0.0, watched.began or stamp is not None
                continue
            watched.quiet_s += passed
            limit_s = self._timeout_s if watched.began else max(self._timeout_s, FIRST_S)
            over_s[rank] = watched.quiet_s - limit_s
            if over_s[rank] > 0:
                problems[rank] = (
                    f"no heartbeat for {watched.quiet_s:.0f} s (--heartbeat-timeout {self._timeout_s:g})"
                    if watched.began
                    else f"no heartbeat in its first {limit_s:g} s: {watched.path} was not touched"
                )
        longest_s = max(over_s.values(), default=0.0)
        follows_soon = any(longest_s - _TOGETHER_S <= over <= 0 for over in over_s.values())
        return {} if follows_soon else problems


def _stamp(path: Path) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _end_silent(torchrun: int, quiet: dict[int, str], attempt: Path) -> None:
    """End silent ranks of an attempt and record why, each with its stack; torchrun then ends or restarts the others.
    SIGABRT makes Python write the stacks of a rank's threads (PYTHONFAULTHANDLER=1), whatever it is doing."""
    start = attempt.name.removeprefix("attempt_")  # its ranks may have ended, and those of the next one begun
    ranks = {local: process for local, process in processes.ranks_of(torchrun, start).items() if local in quiet}
    pids = {pid for pid, _ in ranks.values()}
    _signal(pids, signal.SIGABRT)
    deadline = time.monotonic() + _END_S
    while (living_pids := pids & set(processes.descendants())) and time.monotonic() < deadline:  # without zombies
        time.sleep(_POLL_S)
    _signal(living_pids, signal.SIGKILL)
    for local, (pid, rank) in ranks.items():
        folder = attempt / str(local)
        stack = failure.stacks(failure.tail(folder / "stderr.log"))
        location, waits = failure.locate(stack)
        causes = [quiet[local], *[f"at {location}"] * bool(location), *["it waits for its peers"] * waits]
        causes += ["it did not answer SIGABRT"] * (pid in living_pids)
        failure.record_for(folder, rank, ", ".join(causes), stack)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


SIGNALS = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "usr2": signal.SIGUSR2}
_POLL_S = 0.1
_LOOK_S = 0.5


class Guard:
    """Watches one node's ranks of a script.

    A preemption is announced by a file that the batch job writes, for all nodes at once, or by SIGUSR2 to this
    launcher. Each rank then gets its signal once; with `--on-preempt file` the file itself is the announcement.
    """

    def __init__(self, script: Script, n_ranks: int, log_dir: Path, environ: Mapping[str, str]) -> None:
        self.preempted = False  # whether the ranks were told that their job is preempted
        self._script = script
        self._log_dir = log_dir
        self._file = Path(environ.get(PREEMPT_FILE) or log_dir.absolute() / "preempted")
        self._beats = Heartbeats(script, n_ranks, log_dir) if script.heartbeat is not None else None
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
        """Pass a preemption on and end silent ranks; call it often. Returns True if torchrun restarts the ranks of a
        preempted job, which should then be stopped."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_S
        attempts = failure.attempts(self._log_dir)
        with contextlib.suppress(OSError):  # listing the folder refreshes NFS's cache of missing names
            self.preempted = self.preempted or self._file.name in os.listdir(self._file.parent)
        if self.preempted and self._signalled and len(attempts) > self._attempts:
            return True
        if len(attempts) != self._attempts:
            self._attempts = len(attempts)
            if self._beats is not None:
                self._beats.begin()
        if self.preempted:
            ranks = {pid for pid, _ in processes.ranks_of(process.pid).values()}
            number = SIGNALS.get(self._script.on_preempt)
            if number is not None:
                _signal(ranks - self._signalled, number)
            self._signalled |= ranks
        elif self._beats is not None and attempts and (quiet := self._beats.quiet()):
            _end_silent(process.pid, quiet, attempts[-1])
            self._beats.pause()
        return False

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
