"""What somebody outside may ask a running job for, by signals too: to stop, to save early, to give way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from ..parallel.world import World
from .optimizer_step import Reduction
from .owner import Owner, superseded

# Signals that ask a run to stop: a handler notes them, and all ranks act on them together after a step.

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
"""SIGHUP comes when the terminal closes; under `nohup` the run ignores it."""


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


class Requests:
    """Requests to single ranks, on which all ranks agree in the step's reduction.

    `owner`: of the run directory, on rank 0. `time_is_up`: whether the interval between two saves has passed; asked on
    every rank. `stop`: the signals. `save`: whether the ranks agreed to save after this step.
    """

    def __init__(self, world: World, stop: StopRequest, owner: Owner | None, time_is_up: Callable[[], bool]) -> None:
        self.stop, self.save = stop, False
        self._world, self._owner, self._time_is_up = world, owner, time_is_up

    def add_to(self, reduction: Reduction) -> None:
        """Let the ranks agree on all requests."""
        self._add_urgent(reduction)
        reduction.add("save", [float(self._time_is_up())], self._agree_to_save)

    def stops_now(self) -> bool:
        """Whether some rank was asked to stop; collective, between two steps."""
        reduction = Reduction(self._world)
        self._add_urgent(reduction)
        reduction.begin()
        reduction.finish()
        return self.stop.agreed is not None

    def lost(self) -> str | None:
        """On rank 0 the reason why this run may no longer write to its directory; None if it may, and elsewhere."""
        return None if self._owner is None else self._owner.lost()

    def _add_urgent(self, reduction: Reduction) -> None:
        reduction.add("lost", [float(self.lost() is not None)], self._give_way)
        reduction.add("stop", self.stop.flags(), self.stop.agree)

    def _agree_to_save(self, sums: Sequence[float]) -> None:
        self.save = sums[0] > 0

    def _give_way(self, sums: Sequence[float]) -> None:
        """End all ranks with the same error if another start owns the directory; collective then."""
        if sums[0]:
            (reason,) = [str(reason) for reason in self._world.gather(self.lost()) if reason is not None]
            raise superseded(reason)
