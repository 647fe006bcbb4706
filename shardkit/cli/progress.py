"""Progress of slow commands, on stderr."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable

FIRST_S, EVERY_S = 2.0, 15.0
"""Seconds until a slow command says what it does, and between further lines."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Waiting:
    """A context manager that says what a command waits for: after 2 s, then every 15 s."""

    def __init__(self, doing: str, say: Callable[[str], None] = say) -> None:
        self._doing, self._say = doing, say
        self._began = time.monotonic()
        self._wake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> Waiting:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()

    def now(self, doing: str) -> None:
        """Change what later lines say."""
        self._doing = doing

    def _tell(self) -> None:
        self._wake.wait(FIRST_S)
        while not self._ended:
            self._say(f"{self._doing} ({time.monotonic() - self._began:.0f} s)")
            self._wake.wait(EVERY_S)


class ProgressLine:
    """Shows progress on stderr: on a single line of a terminal, else line by line."""

    def __init__(self) -> None:
        self._shown = 0

    def __call__(self, line: str) -> None:
        if not sys.stderr.isatty():
            say(line)
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        print(line.ljust(self._shown), end="\r", file=sys.stderr, flush=True)
        self._shown = len(line)
