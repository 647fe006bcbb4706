"""Key figures, and what is drawn, are the files' numbers, and names stay names."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from shardkit.memory.rows import StateBytes
from shardkit.report import figures, measure, planned, traced
from shardkit.report.measure import KeyFigure
from shardkit.report.read import Gather, Run, read_run
from tests.memory.samples import MIB, gpu_row
from tests.report.samples import EVIL, cpu_rows, plan, trace, write_run


@pytest.fixture
def gpu(tmp_path: Path) -> Run:
    return read_run(write_run(tmp_path / "run", gpu=True))


def by_name(figure: figures.Figure) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in figure.data}


def test_memory_over_time_is_each_ranks_peak_to_the_byte(gpu: Run) -> None:
    drawn = [entry for entry in figures.memory(gpu).data if entry["yaxis"] == "y"]
    assert [entry["x"] for entry in drawn] == [[1, 5, 10, 15, 20]] * 4
    for rank, entry in enumerate(drawn):
        assert [y * 2**30 for y in entry["y"]] == [(3 + rank) * 2**30 + step * MIB for step in entry["x"]]


def test_names_are_escaped_and_never_templates(tmp_path: Path) -> None:
    gpu = read_run(write_run(tmp_path / "run", gpu=True, host=EVIL))
    everything = [figures.memory(gpu), figures.phases({EVIL: {"update": 1}}, "x"), traced.timeline(trace(0, EVIL)),
                  figures.ranks(gpu.last_rows, {}), figures.categories({EVIL: {"device": {"params": 1}}})]  # fmt: skip
    for figure in everything:
        assert "<script" not in str(figure.data) + str(figure.layout)
        assert "&lt;script" in str(figure.data)
        assert all("script" not in entry["hovertemplate"] for entry in figure.data)


def test_stacked_categories_sum_to_the_peak(gpu: Run) -> None:
    rows = {row.name: measure.parts(row) for row in gpu.last_rows}
    figure = figures.categories(rows)
    for column, row in enumerate(gpu.last_rows):
        device = [entry["y"][2 * column] * 2**30 for entry in figure.data]
        assert sum(device) == row.device_mem.peak_allocated
    assert by_name(figure)["optimizer"]["y"][1] == 2.0  # offloaded: on the host


def test_a_long_line_keeps_its_extremes_and_its_end() -> None:
    draw = random.Random(0)
    ys = [draw.random() for _ in range(100_000)]
    ys[54_321], ys[777] = 9.0, -9.0
    xs, kept = figures.thin(range(len(ys)), ys)
    assert len(xs) <= figures.POINTS + 1
    assert (xs[kept.index(9.0)], xs[kept.index(-9.0)], xs[-1]) == (54_321, 777, 99_999)
    assert all(ys[int(x)] == y for x, y in zip(xs, kept, strict=True))


def test_the_timeline_is_stacked_over_bands_in_lanes() -> None:
    figure = traced.timeline(trace(5))
    drawn = by_name(figure)
    peak = max(range(40), key=lambda i: drawn["total"]["y"][i])
    assert drawn["total"]["y"][peak] * MIB == 200 * MIB + 5
    assert (drawn["params"]["y"][peak] + drawn["activations"]["y"][peak]) * MIB == 200 * MIB + 5
    lanes = {(band.module, band.phase): band.lane for band in traced.bands(trace())}
    assert lanes == {("model", "forward"): 0, ("model.layers.0", "forward"): 1, ("model.layers.1", "forward"): 1,
                     ("model.layers.0", "backward"): 0}  # fmt: skip
    assert drawn["forward"]["base"] == [0, 2, 10]
    assert drawn["forward"]["x"] == [19, 7, 8]


def test_predictions_stand_beside_what_was_measured(gpu: Run) -> None:
    found = {(c.rank, c.figure): c for c in planned.compared(plan(), gpu.gathers, {})}
    peak = found[3, "peak allocated"]
    assert (peak.predicted, peak.measured) == (3 * 2**30, 6 * 2**30 + 20 * MIB)
    assert peak.error == pytest.approx(3 / (6 + 20 / 1024) - 1)
    assert found[0, "allocated in backward"].measured == 3 * 2**30 + 20 * MIB - 1
    assert found[2, "params on the device"].measured == 2**29 + 2
    assert found[2, "activations on the device"].measured is None
    assert found[2, "activations on the device"].error is None
    others = found[1, "all but state"]
    assert (others.predicted, others.measured) == (2**30, gpu.last_rows[1].unattributed)


def test_on_the_cpu_the_plan_is_compared_with_the_trace(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    found = {(c.rank, c.figure): c.measured for c in planned.compared(plan(), run.gathers, {0: trace()})}
    assert found[0, "peak allocated"] == 200 * MIB
    assert found[0, "activations on the device"] == 100 * MIB
    assert found[1, "peak allocated"] is None
    assert (0, "allocated in backward") not in found


def test_a_plan_of_one_rank_holds_for_the_ranks_that_hold_as_much(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    first = plan() | {"ranks": plan()["ranks"][:1]}
    found = {(c.rank, c.figure): c.measured for c in planned.compared(first, run.gathers, {0: trace(), 1: trace(1)})}
    assert (found[0, "peak allocated"], found[1, "peak allocated"]) == (200 * MIB, 200 * MIB + 1)
    rows = run.gathers[-1].rows
    rows[1] = replace(rows[1], state={**(rows[1].state or {}), "params": StateBytes(7, 0)})
    assert {c.rank for c in planned.compared(first, run.gathers, {})} == {0}, "a smaller shard was not planned"


def test_a_plan_may_be_about_a_single_rank(gpu: Run) -> None:
    one = {"rank": 1, "peak": {"allocated": 7}, "host_peak": 2**31}
    found = {c.figure: (c.rank, c.predicted, c.measured) for c in planned.compared(one, gpu.gathers, {})}
    assert found == {"peak allocated": (1, 7, 4 * 2**30 + 20 * MIB), "tensors on the host": (1, 2**31, 2**31)}


def test_samples_are_not_called_tokens(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    config = (path / "config.yaml").read_text()
    named = '"name": "causal_lm"'
    for task, called in (
        (named, "tokens"),
        ('"name": "image_classification"', "samples"),
        ('"factory": "a:B"', "targets"),
    ):
        (path / "config.yaml").write_text(config.replace(named, task))
        run = read_run(path)
        assert f"{called}/s" in [t["name"] for t in figures.training({"": run}).data]
        assert f"{called} per second" in [found.label for found in measure.key_figures(run)]


def test_of_many_ranks_those_with_the_largest_peaks_stand_beside_the_plan(gpu: Run) -> None:
    rows = [gpu_row(rank, (10 + rank) * 2**30) for rank in range(7)]
    found = [planned.Compared(row.identity.rank, "peak allocated", 2**30, float(row.identity.rank)) for row in rows]
    heading = planned.beside(found, replace(gpu, gathers=[replace(gpu.gathers[-1], rows=rows)])).splitlines()[0]
    assert [name for name in heading.split() if "@" in name] == ["3@node1", "4@node1", "5@node1", "6@node1"], heading


def test_key_figures_of_a_run_on_gpus(gpu: Run) -> None:
    figures = {figure.label: figure for figure in measure.key_figures(gpu)}
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
    began = datetime(2026, 1, 1, tzinfo=timezone.utc)
    fast = [replace(row, step_time_s=0.5) for row in cpu_rows(1)]
    for ranks, environment in ((4, {}), (2, {"time": began.strftime("%Y-%m-%dT%H:%M:%S%z")})):
        slow = [
            replace(row, step_time_s=9.0, identity=replace(row.identity, rank=rank))
            for rank, row in enumerate([*fast, *fast][:ranks])
        ]
        gathers = [Gather(1 + i, began.timestamp() - 9 + i, slow) for i in range(2)]
        gathers += [Gather(3 + i, began.timestamp() + i, fast) for i in range(3)]
        times = measure.step_times(replace(run, gathers=gathers, environment=environment))
        assert {rank: time.total for rank, time in times.items()} == {0: 0.5, 1: 0.5}
