"""Phase peaks, with probes whose readings are given."""

from __future__ import annotations

from typing import Any

import pytest

from shardkit.memory.probe import DeviceCounters, HostCounters, PhaseMeter
from shardkit.memory.rows import PhaseMemory


class Machine:
    """Both probes of a machine on which device and host bytes are always equal."""

    def __init__(self) -> None:
        self.now = self.peak = 10

    def use(self, *levels: int) -> None:
        for self.now in levels:
            self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        self.peak = self.now


class Device(Machine):
    def read(self) -> DeviceCounters:
        return DeviceCounters(self.now, self.peak, 2 * self.now, 2 * self.peak, 0, 0)


class Host(Machine):
    def read(self) -> HostCounters:
        return HostCounters(self.now, self.peak)


class Both:
    def __init__(self) -> None:
        self.device, self.host = Device(), Host()
        self.recorder = PhaseMeter(self.device, self.host)

    def use(self, *levels: int) -> None:
        self.device.use(*levels)
        self.host.use(*levels)

    def spend(self, phase: str, *levels: int, follows: bool = False) -> None:
        """A phase from its begin to its end, with these levels inside."""
        self.recorder.begin(phase, follows=follows)
        self.use(*levels)
        self.recorder.end()

    def peak(self, phase: str) -> int:
        row: PhaseMemory = self.recorder.rows()[phase]
        assert row.peak_allocated == row.peak_rss
        assert row.peak_reserved == 2 * row.peak_rss
        assert (row.allocated, row.reserved) == (row.rss, 2 * row.rss)
        return row.peak_rss


@pytest.fixture
def both() -> Both:
    return Both()


def test_a_phase_keeps_its_largest_peak_of_an_interval_and_those_that_do_not_come_again(both: Both) -> None:
    both.spend("init", 90, 20)
    for peak in (30, 50, 40):
        both.spend("forward", peak, 20)
        both.spend("backward", peak + 5, 20)
    assert (both.peak("forward"), both.peak("backward"), both.recorder.rows()["forward"].rss) == (50, 55, 20)
    both.recorder.start_interval()
    both.spend("forward", 40, 20)
    assert (both.peak("init"), both.peak("forward")) == (90, 40)


def test_what_happens_between_phases_counts_for_the_run_only_and_an_outer_phase_covers_the_inner(both: Both) -> None:
    both.use(500, 20)
    both.recorder.begin("init")
    both.use(60, 20)
    both.spend("wrap", 40, 20)
    assert both.peak("wrap") == 40
    both.recorder.end()
    assert both.peak("init") == 60
    device, host = both.recorder.overall()
    assert (device.peak_allocated, host.peak_rss, host.rss) == (500, 500, 20)


def test_where_the_host_is_not_read_phases_keep_its_figures_and_the_run_loses_no_peak(both: Both) -> None:
    def forward(peak: int) -> PhaseMemory:
        both.spend("forward", peak, 20)
        return both.recorder.rows()["forward"]

    forward(50)
    both.recorder.start_interval()
    both.recorder.reads_host = False
    row = forward(70)
    assert (row.peak_allocated, row.peak_rss) == (70, 50)
    both.recorder.reads_host = True
    row = forward(30)
    assert (row.peak_allocated, row.peak_rss) == (70, 30)
    assert both.recorder.overall()[1].peak_rss == 70


def test_a_phase_that_follows_shares_the_reading_of_the_one_before_it(both: Both, monkeypatch: Any) -> None:
    readings = []
    read = both.device.read
    monkeypatch.setattr(both.device, "read", lambda: readings.append(1) or read())
    for name, peak in (("forward", 40), ("backward", 70), ("update", 50)):
        both.spend(name, peak, 20, follows=name != "forward")
    assert [both.peak(name) for name in ("forward", "backward", "update")] == [40, 70, 50]
    assert len(readings) == 4
