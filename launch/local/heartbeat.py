"""Notice ranks of a script that stop touching their heartbeat file, and end them with their stacks in the log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import LaunchError, system_errors
from ..failures import failure, stderr
from ..script import AUTO, HEARTBEAT, Script
from . import processes

FIRST_S = 600.0
"""The first heartbeat of a start may take this long if `--heartbeat-timeout` is shorter: imports, compilation."""
_GAP_S = 2.0  # a longer pause between two looks: this process itself was suspended
_TOGETHER_S = 2.0  # ranks whose last heartbeats lie no further apart fell silent together
_END_S = 5.0  # for a rank to write its stacks
_POLL_S = 0.05


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
        """The variable that tells ranks where to touch their files; none if the user chose the files.

        Raises:
            LaunchError: the folder cannot be made.
        """
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


def end(torchrun: int, quiet: dict[int, str], attempt: Path) -> None:
    """End silent ranks of an attempt and record why, each with its stack; torchrun then ends or restarts the others.

    SIGABRT makes Python write the stacks of a rank's threads (PYTHONFAULTHANDLER=1), whatever it is doing.
    """
    start = attempt.name.removeprefix("attempt_")  # its ranks may have ended, and those of the next one begun
    ranks = {local: process for local, process in processes.ranks_of(torchrun, start).items() if local in quiet}
    _signal([pid for pid, _ in ranks.values()], signal.SIGABRT)
    deadline = time.monotonic() + _END_S
    while (living_pids := _alive([pid for pid, _ in ranks.values()])) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    _signal(living_pids, signal.SIGKILL)
    for local, (pid, rank) in ranks.items():
        folder = attempt / str(local)
        stack = stderr.stacks(stderr.tail(folder / "stderr.log"))
        location, waits = stderr.locate(stack)
        causes = [
            quiet[local],
            *([f"at {location}"] if location else []),
            *(["it waits for its peers"] if waits else []),
        ]
        causes += ["it did not answer SIGABRT"] if pid in living_pids else []
        failure.record_for(folder, rank, ", ".join(causes), stack)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    running = set(processes.descendants())
    return [pid for pid in pids if pid in running]
