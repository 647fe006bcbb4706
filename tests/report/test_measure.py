"""Key figures are what the files say."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from shardkit.report import measure
from shardkit.report.measure import KeyFigure
from shardkit.report.read import Gather, Run, read_run
from tests.memory.samples import MIB
from tests.report.samples import cpu_rows, write_run


@pytest.fixture
def gpu(tmp_path: Path) -> Run:
    return read_run(write_run(tmp_path / "run", gpu=True))


def found(run: Run) -> dict[str, KeyFigure]:
    return {figure.label: figure for figure in measure.key_figures(run)}


def test_key_figures_of_a_run_on_gpus(gpu: Run) -> None:
    figures = found(gpu)
    assert figures["final loss"].value == pytest.approx(2.0)
    assert figures["best loss"].value == pytest.approx(1.2)
    assert figures["best loss"].remark == "step 19"
    assert figures["validation loss"].value == 3.25
    assert figures["tokens per second"].value == 400  # the first step, at 200, warms up
    assert figures["step time"].value == 0.25
    assert figures["waiting for data"].value == pytest.approx(20 * 0.05 / (0.5 + 19 * 0.25))
    shares = [figures[phase].value for phase in ("forward", "backward", "update")]
    assert shares == pytest.approx([0.2, 0.4, 0.1]), "of the steps that have them"
    assert figures["stalled by saves"].value == 1.0
    assert figures["peak allocated"] == KeyFigure("peak allocated", 6 * 2**30 + 20 * MIB, "bytes", "rank 3@node1")
    assert figures["largest peak / mean peak"].value == pytest.approx((6 * 2**30 + 20 * MIB) / (4.5 * 2**30 + 20 * MIB))
    assert figures["skipped steps"].value == 1


def test_without_files_every_figure_is_none(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=0)
    assert {figure.value for figure in measure.key_figures(read_run(path))} == {None}


def test_the_rank_that_is_busy_for_long_is_named(gpu: Run) -> None:
    [(slow, times)] = measure.stragglers(gpu)
    assert (slow.name, times) == ("3@node1", 5)
    assert slow.ratio == pytest.approx(4.5)


def test_peaks_by_phase_are_the_largest_of_all_gathers(gpu: Run) -> None:
    peaks = measure.phase_peaks(gpu.gathers, 2)
    assert list(peaks) == ["init", "wrap", "forward", "backward", "update"]
    assert peaks["update"] == 5 * 2**30 + 20 * MIB
    assert peaks["init"] == 5 * 2**30 + 20 * MIB - 4


def test_step_times_are_those_of_the_last_start_alone(tmp_path: Path) -> None:
    """Of a run that went on with other ranks, and of one that did with as many."""
    run = read_run(write_run(tmp_path / "run"))
    slow = [replace(row, step_time_s=9.0) for row in [*cpu_rows(1), *cpu_rows(1)]]
    four = [replace(row, identity=replace(row.identity, rank=rank)) for rank, row in enumerate(slow)]
    fast = [replace(row, step_time_s=0.5) for row in cpu_rows(1)]
    gathers = [Gather(1, 1e3, four), Gather(2, 2e3, four), *(Gather(3 + i, 3e3 + i, fast) for i in range(3))]
    times = measure.step_times(replace(run, gathers=gathers, environment={}))
    assert {rank: time.total for rank, time in times.items()} == {0: 0.5, 1: 0.5}
    began = datetime(2026, 1, 1, tzinfo=timezone.utc)
    same = [replace(row, step_time_s=9.0) for row in fast]
    gathers = [Gather(1, began.timestamp() - 9, same), Gather(2, began.timestamp() - 8, same)]
    gathers += [Gather(3 + i, began.timestamp() + i, fast) for i in range(3)]
    environment = {"time": began.strftime("%Y-%m-%dT%H:%M:%S%z")}
    times = measure.step_times(replace(run, gathers=gathers, environment=environment))
    assert {rank: time.total for rank, time in times.items()} == {0: 0.5, 1: 0.5}
