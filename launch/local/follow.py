"""Showing files on the terminal while others write them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

_TRACEBACK = re.compile(rb"^(\[rank\d+\]: )?(Traceback \(most recent call last\):|error: )", re.MULTILINE)


class Follower:
    """Copies what is appended to one file; the file may appear later, and may be shortened."""

    def __init__(self, path: Path, out: BinaryIO) -> None:
        self.path = path
        self._out = out
        self._offset = 0

    def pump(self, stop_at_error: bool = False) -> int:
        """Copy what is new; returns the number of bytes. `stop_at_error` drops a traceback and what comes after it."""
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
                if size < self._offset:  # started anew
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet
            return b""
        self._offset += len(data)
        return data


class RankOutput:
    """Rank 0's output below a torchrun log directory, attempt after attempt."""

    def __init__(self, log_dir: Path, out: BinaryIO, err: BinaryIO, local_rank: int = 0) -> None:
        self._log_dir, self._local_rank = log_dir, local_rank
        self._streams = {"stdout.log": out, "stderr.log": err}
        self._followers: dict[Path, Follower] = {}

    def pump(self) -> int:
        """Copy what is new. A traceback that the rank also recorded is left to the launcher's report."""
        copied = 0
        for name, stream in self._streams.items():
            for path in sorted(self._log_dir.glob(f"*/attempt_*/{self._local_rank}/{name}")):
                follower = self._followers.setdefault(path, Follower(path, stream))
                copied += follower.pump(stop_at_error=(path.parent / "error.json").exists())
        return copied
