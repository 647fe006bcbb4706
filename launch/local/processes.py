"""Start processes, leave no child behind, and show their output while they write it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from ...files import open_regular

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, so that it can end all of them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """Let this rank get SIGTERM when its torchrun dies. Nothing else would end it while it waits for peers."""
    if "TORCHELASTIC_RUN_ID" in environ:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def keep_exit_code(environ: Mapping[str, str]) -> None:
    """Ignore torchrun's SIGTERM from now on: the interpreter's exit takes a moment, and a rank that lost this one may
    end sooner. torchrun would then report the signal instead of the exit code. It sends SIGKILL after 30 s."""
    if "TORCHELASTIC_RUN_ID" in environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # unlike a function, it lasts until the process is gone
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def note_early() -> None:
    """Keep SIGUSR2 pending for the run that is about to start; it then cannot end the run or its children.

    Slurm sends it to every process of a step. Loader and compiler processes inherit the block, which also covers the
    interpreter's exit. SIGTERM still ends the process: there is nothing to save yet. Call this at a process's entry,
    before it has threads.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


@contextlib.contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    """Handle signals by a function, or by signal.SIG_IGN, in this block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def start(argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start `argv` out of reach of the terminal's Ctrl-C; it gets SIGTERM if this process dies."""
    parent = os.getpid()

    def tie_to_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died in between
            os._exit(1)

    return subprocess.Popen(
        list(argv), env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True, preexec_fn=tie_to_parent,
    )  # fmt: skip


def descendants(pid: int | None = None) -> list[int]:
    """Process ids below `pid` (default: this process), parents first, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    pids, queue = [], [os.getpid() if pid is None else pid]
    while queue:
        below = children.get(queue.pop(0), [])
        pids += below
        queue += below
    return pids


def ranks_of(torchrun: int, start: str | None = None) -> dict[int, tuple[int, int]]:
    """Local rank → (process id, rank) of a torchrun process's ranks; `start`: its TORCHELASTIC_RESTART_COUNT."""
    ranks: dict[int, tuple[int, int]] = {}
    for pid in descendants(torchrun):
        try:
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        environ = dict(line.partition("=")[::2] for line in lines)
        numbers = environ.get("LOCAL_RANK", ""), environ.get("RANK", "")
        is_rank = int(parent) == torchrun and all(number.isdecimal() for number in numbers)
        if is_rank and start in (None, environ.get("TORCHELASTIC_RESTART_COUNT")):
            ranks[int(numbers[0])] = (pid, int(numbers[1]))
    return ranks


def stop(process: subprocess.Popen[bytes], signum: int, grace_s: float) -> None:
    """Send `signum`, wait up to `grace_s`, then kill every process that is left."""
    if process.poll() is None:
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    sweep()
    process.wait()


def rank_processes(torchrun: int) -> set[int]:
    """Process ids of the ranks that a torchrun process runs, or ran: this process has adopted those that outlive it."""
    return {pid for parent in (torchrun, os.getpid()) for pid, _ in ranks_of(parent).values()}


def sweep(timeout_s: float = 2.0) -> list[int]:
    """Kill every process below this one; returns their ids. Only for a process that owns all its children. `timeout_s`:
    for those that do not end of it, and for new ones; all are killed once, however late this one is."""
    killed: list[int] = []
    deadline = time.monotonic() + timeout_s
    while living_pids := descendants():
        for pid in living_pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.append(pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)  # the kernel takes a moment; orphans of the killed turn up in the next round
    return sorted(set(killed))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


_TRACEBACK = re.compile(rb"^(\[rank\d+\]: )?(Traceback \(most recent call last\):|error: )", re.MULTILINE)


class Follower:
    """Copies text that is appended to a file; the file may appear later, and may be truncated."""

    def __init__(self, path: Path, out: BinaryIO) -> None:
        self.path = path
        self._out = out
        self._offset = 0
        self._has_stopped = False

    def pump(self, stop_at_error: bool = False) -> int:
        """Copy new text; returns the number of bytes. `stop_at_error` drops a traceback and everything after it."""
        chunk = self._new()
        if self._has_stopped:  # the rest of a traceback that was being written
            return 0
        if stop_at_error and (match := _TRACEBACK.search(chunk)):
            self._has_stopped = True
            chunk = chunk[: match.start()]
        if chunk:
            self._out.write(chunk)
            self._out.flush()
        return len(chunk)

    def _new(self) -> bytes:
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # truncated
                    self._offset = 0
                file.seek(self._offset)
                chunk = file.read()
        except OSError:  # not there yet
            return b""
        self._offset += len(chunk)
        return chunk


_QUIET_S, _HOLD_S = 10.0, 60.0
_DIED = re.compile(rb"^(\[rank\d+\]: )?(Traceback \(most recent call last\):|Fatal Python error: )", re.MULTILINE)


class PatientFollower(Follower):
    """A follower that withholds a traceback until the rank writes on: if it died, another error may have come first."""

    def __init__(self, path: Path, out: BinaryIO) -> None:
        super().__init__(path, out)
        self.showed_traceback = False  # whether a traceback was copied
        self._traceback, self._since = b"", 0.0

    def pump(self, stop_at_error: bool = False) -> int:
        chunk = self._new()
        if self._traceback:
            self._traceback += chunk
            age_s = time.monotonic() - self._since  # a process that dies of it writes nothing more, or soon
            return self.release() if age_s > _HOLD_S or (chunk and age_s > _QUIET_S) else 0
        match = _DIED.search(chunk)
        if match is not None:
            self._traceback, self._since = chunk[match.start() :], time.monotonic()
            chunk = chunk[: match.start()]
        self._out.write(chunk)
        self._out.flush()
        return len(chunk)

    def release(self) -> int:
        """Copy the traceback that was withheld; returns the number of bytes."""
        chunk, self._traceback = self._traceback, b""
        self.showed_traceback = self.showed_traceback or bool(chunk)
        self._out.write(chunk)
        self._out.flush()
        return len(chunk)


class RankOutput:
    """Copies one rank's output (default: rank 0's) below a torchrun log directory, attempt after attempt. `patient`:
    hold back tracebacks, which ranks that run shardkit record in an error file."""

    def __init__(self, log_dir: Path, out: BinaryIO, err: BinaryIO, local_rank: int = 0, patient: bool = False) -> None:
        self._log_dir, self._local_rank = log_dir, local_rank
        self._streams = {"stdout.log": out, "stderr.log": err}
        self._kinds = {"stdout.log": Follower, "stderr.log": PatientFollower if patient else Follower}
        self._followers: dict[Path, Follower] = {}

    def pump(self) -> int:
        """Copy new text; returns the number of bytes. A recorded traceback is left to the launcher's report."""
        copied = 0
        for name, stream in self._streams.items():
            for path in sorted(self._log_dir.glob(f"*/attempt_*/{self._local_rank}/{name}")):
                follower = self._followers.setdefault(path, self._kinds[name](path, stream))
                copied += follower.pump(stop_at_error=(path.parent / "error.json").exists())
        return copied

    def finish(self, failed: bool) -> bool:
        """Copy the rest, of failed ranks without the last traceback; returns whether a traceback was copied."""
        self.pump()
        patient = [follower for follower in self._followers.values() if isinstance(follower, PatientFollower)]
        for follower in patient if not failed else patient[:-1]:
            follower.release()
        return any(follower.showed_traceback for follower in patient[-1:])
