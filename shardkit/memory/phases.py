"""Peaks of the phases that run, kept between gathers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from .probe import DeviceCounters, DeviceProbe, HasState, HostCounters, HostProbe
from .rows import PhaseMemory, PhaseName


class Phases(Protocol):
    """A listener of a training step: it hears which phase runs, and sees the state once gradients are complete.

    The ledger listens to every step. A profiler, a traced step and the planner listen too, and forward to a ledger if
    there is one. Each of them hears the same step, and knows nothing of the engine except its `HasState`.
    """

    def phase(self, name: PhaseName, follows: bool = False) -> AbstractContextManager[None]:
        """Context of one phase; `follows`: it begins where the phase before it ended, with nothing in between."""

    def sample_state(self, source: HasState) -> None:
        """Look at the state now: after the last backward, before the optimizer step."""


@dataclass
class _Peaks:
    """The largest figures so far, and the latest."""

    device: DeviceCounters | None = None
    host: HostCounters | None = None
    stale: bool = False
    stale_host: bool = False

    def add(self, device: DeviceCounters | None, host: HostCounters | None) -> None:
        # Peaks are the largest over all runs of the phase; the other figures are those of its last end.
        if device is not None:
            if self.device is not None:
                allocated = max(device.peak_allocated, self.device.peak_allocated)
                reserved = max(device.peak_reserved, self.device.peak_reserved)
                device = DeviceCounters(
                    device.allocated, allocated, device.reserved, reserved, device.alloc_retries, device.ooms
                )
            self.device = device
        if host is not None:
            if self.host is not None:
                host = HostCounters(host.rss, max(host.peak_rss, self.host.peak_rss))
            self.host = host

    def forget(self, host: bool) -> None:
        """Drop the previous interval's figures; the host's only if they will be read again."""
        if self.stale:
            self.device, self.stale = None, False
        if self.stale_host and host:
            self.host, self.stale_host = None, False


Doing = PhaseName | Literal["save"]


@contextmanager
def doing(name: Doing) -> Iterator[None]:
    """Mark an exception from inside as raised while doing this; nothing is measured."""
    try:
        yield
    except Exception as error:
        note_phase(error, name)
        raise


def note_phase(error: BaseException, name: Doing) -> None:
    """Record on an exception the phase it came from; the innermost phase records first and stays."""
    if phase_of(error) is None:
        error.shardkit_phase = name  # type: ignore[attr-defined]


def phase_of(error: BaseException) -> Doing | None:
    """The phase that an exception came from; `None` outside of all phases."""
    return getattr(error, "shardkit_phase", None)


class PhaseMeter:
    """Reads both probes at the edges of phases; each reading covers the time since the one before it."""

    def __init__(self, device: DeviceProbe, host: HostProbe) -> None:
        self._device, self._host = device, host
        # whether the host's memory is read there; while it is not, phases keep their figures of it
        self.reads_host = True
        self._overall = _Peaks()
        self._phases: dict[PhaseName, _Peaks] = {}
        self._open: list[PhaseName] = []

    @property
    def current(self) -> PhaseName | None:
        return self._open[-1] if self._open else None

    def begin(self, name: PhaseName, follows: bool = False) -> None:
        """Peaks until now belong to the phases already open (and to the run); the new phase's start here.

        `follows`: nothing happened since the last phase ended, so its reading serves here too.
        """
        if not follows:
            self._read()
        self._enter(name)

    def change(self, name: PhaseName) -> None:
        """`end`, and `begin` at the same moment: one reading serves both."""
        # Read before the pop: the peak since the last reading belongs to the phase that ends.
        self._read()
        self._open.pop()
        self._enter(name)

    def _enter(self, name: PhaseName) -> None:
        self._device.reset_peak()
        if self.reads_host:
            self._host.reset_peak()
        peaks = self._phases.setdefault(name, _Peaks())
        peaks.forget(self.reads_host)
        self._open.append(name)

    def end(self) -> None:
        self._read()
        self._open.pop()

    def overall(self) -> tuple[DeviceCounters | None, HostCounters]:
        """Figures now, with peaks since this meter was created."""
        self._read(self._host.read())
        assert self._overall.host is not None
        return self._overall.device, self._overall.host

    def rows(self) -> dict[PhaseName, PhaseMemory]:
        """Every phase that has run; one that did not run since the last gather keeps its figures."""
        rows = {}
        for name, peaks in self._phases.items():
            if peaks.host is not None:
                device = peaks.device
                nothing = PhaseMemory(None, None, None, None, *peaks.host)
                rows[name] = nothing if device is None else PhaseMemory(*device[:4], *peaks.host)
        return rows

    def start_interval(self) -> None:
        """From now on, a phase's first run replaces its figures."""
        # Figures become stale and are not dropped: a phase that does not run again is still in the next row.
        for name, peaks in self._phases.items():
            peaks.stale = peaks.stale_host = name not in self._open

    def _read(self, host: HostCounters | None = None) -> None:
        device = self._device.read()
        if self.reads_host:
            host = host or self._host.read()
        self._overall.add(device, host)
        # Every open phase gets the reading: the peaks of an outer phase cover those of the phases within it.
        for name in self._open:
            self._phases[name].add(device, host)
