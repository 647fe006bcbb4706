"""Signals that ask a run to stop: noted when they come, acted on by all ranks together after a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType

PREEMPTED = 75
"""Exit code of a run that saved and stopped because it was asked to (EX_TEMPFAIL of sysexits.h: try again later)."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
"""SIGHUP comes when the terminal is closed; `nohup` ignores it, and so does the run then."""


def note_early() -> None:
    """From now on SIGUSR2 stays pending for the run that is about to start, and can end neither it nor its children.

    Slurm sends it to every process of a step: loader and compiler processes inherit the block, as the last seconds of
    the interpreter do. SIGTERM still ends the process: there is nothing to save yet. For a process's entry, before it
    has threads.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


class StopRequest:
    """Notes SIGTERM, SIGUSR2 and SIGHUP between `listen` and `close`; the handlers do nothing else.

    Attributes:
        agreed: name of the signal that the ranks agreed to stop for, `None` until then.
    """

    def __init__(self) -> None:
        self.agreed: str | None = None
        self._seen: set[int] = set()
        self._previous: dict[int, object] = {}

    def listen(self) -> None:
        """Take over the signals; without effect outside the main thread, where Python cannot."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen.add(number)

    def flags(self) -> list[float]:
        """One number per signal, to be summed over ranks."""
        pending = signal.sigpending()  # of those that are blocked
        return [float(number in self._seen or number in pending) for number in SIGNALS]

    def agree(self, sums: Sequence[float]) -> None:
        """Take over what the ranks found: one that was asked stops all of them."""
        for number, total in zip(SIGNALS, sums, strict=True):
            if total > 0 and self.agreed is None:
                self.agreed = number.name

    def close(self) -> None:
        """Give the signals back to the handlers they had."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
