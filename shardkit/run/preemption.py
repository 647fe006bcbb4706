"""Signals that ask a run to stop: a handler notes them, and all ranks act on them together after a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
"""SIGHUP comes when the terminal closes; under `nohup` the run ignores it."""


def note_early() -> None:
    """Keep SIGUSR2 pending for the run that is about to start; it then cannot end the run or its children.

    Slurm sends it to every process of a step. Loader and compiler processes inherit the block, which also covers the
    interpreter's exit. SIGTERM still ends the process: there is nothing to save yet. Call this at a process's entry,
    before it has threads.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


class StopRequest:
    """Notes SIGTERM, SIGUSR2 and SIGHUP between `listen` and `close`; the handlers do nothing else."""

    def __init__(self) -> None:
        self.agreed: str | None = None  # name of the signal that the ranks agreed to stop for; `None` until then
        self._seen: set[int] = set()
        self._previous: dict[int, object] = {}

    def listen(self) -> None:
        """Install the handlers; no effect outside the main thread, where Python cannot."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen.add(number)

    def flags(self) -> list[float]:
        """One number per signal; sum them over ranks and pass the sums to `agree`."""
        pending = signal.sigpending()  # only blocked signals
        return [float(number in self._seen or number in pending) for number in SIGNALS]

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' `flags`: a request to one rank stops all of them."""
        for number, total in zip(SIGNALS, sums, strict=True):
            if total > 0 and self.agreed is None:
                self.agreed = number.name

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
