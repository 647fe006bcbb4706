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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """From now on orphaned descendants become this process's children: none gets lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """From now on this rank gets SIGTERM if its torchrun dies: nothing else would end it while it waits for peers."""
    if "TORCHELASTIC_RUN_ID" in environ:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start(argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start `argv` out of reach of the terminal's Ctrl-C; it gets SIGTERM if this process dies.

    Raises:
        FileNotFoundError: the program does not exist.
    """
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
    found, queue = [], [os.getpid() if pid is None else pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def stop(process: subprocess.Popen[bytes], signum: int, grace_s: float) -> None:
    """Send `signum`, wait up to `grace_s`, then kill every process that is left."""
    if process.poll() is None:
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    sweep()
    process.wait()


def sweep(timeout_s: float = 2.0) -> list[int]:
    """Kill every process below this one; returns their ids. Only for a process that owns all its children."""
    killed: list[int] = []
    deadline = time.monotonic() + timeout_s
    while (left := descendants()) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.append(pid)
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

    def pump(self, stop_at_error: bool = False) -> int:
        """Copy new text; returns the number of bytes. `stop_at_error` drops a traceback and everything after it."""
        data = self._new()
        if stop_at_error and (match := _TRACEBACK.search(data)):
            data = data[: match.start()]
        if data:
            self._out.write(data)
            self._out.flush()
        return len(data)

    def _new(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # truncated
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet
            return b""
        self._offset += len(data)
        return data


class RankOutput:
    """Copies one rank's output (default: rank 0's) below a torchrun log directory, attempt after attempt."""

    def __init__(self, log_dir: Path, out: BinaryIO, err: BinaryIO, local_rank: int = 0) -> None:
        self._log_dir, self._local_rank = log_dir, local_rank
        self._streams = {"stdout.log": out, "stderr.log": err}
        self._followers: dict[Path, Follower] = {}

    def pump(self) -> int:
        """Copy new text; returns the number of bytes. A recorded traceback is left to the launcher's report."""
        copied = 0
        for name, stream in self._streams.items():
            for path in sorted(self._log_dir.glob(f"*/attempt_*/{self._local_rank}/{name}")):
                follower = self._followers.setdefault(path, Follower(path, stream))
                copied += follower.pump(stop_at_error=(path.parent / "error.json").exists())
        return copied
