"""The table says who is worst, overall and per node; the file stays readable."""

from __future__ import annotations

import logging
import resource
from dataclasses import replace
from pathlib import Path

import pytest

import shardkit.memory
from shardkit import files
from shardkit.errors import ConfigError, DataError
from shardkit.memory.rows import Spread, StateBytes, quantized_bytes, summary
from shardkit.memory.table import read_jsonl, render_table, write_jsonl
from tests.memory.samples import MIB, cpu_row, gpu_row


def line_of(text: str, rank: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [rank])


def test_cpu_shows_what_there_is_and_marks_the_worst() -> None:
    text = render_table([cpu_row(0), cpu_row(1, peak_rss=400 * MIB)])
    assert line_of(text, "0") == [
        "0", "node1", "1.00", "2.00", "3.00", "4.00", "200.0", "300.0", "100.0"
    ]  # fmt: skip
    assert line_of(text, "*1")[7] == "400.0"
    assert "MiB" in text
    assert "GiB" not in text
    assert "peak RSS:       max 400.0 MiB (rank 1@node1), min 300.0 MiB, max / mean 1.14" in text
    assert "peak allocated:" not in text


def test_gpu_shows_offloaded_state_beside_the_devices() -> None:
    text = render_table([gpu_row(0), gpu_row(1, peak=4 * 2**30)])
    assert "0.50 +2.00h" in text
    assert "h: held in host memory" in text
    assert line_of(text, "*1")[-6:] == ["4.00", "5.00", "1.00", "2.00", "2", "500.0"]
    assert "peak allocated: max 4.00 GiB (rank 1@node1), min 3.00 GiB, max / mean 1.14" in text


def test_many_ranks_show_the_extremes_only() -> None:
    rows = [gpu_row(rank, peak=(rank + 1) * 2**28) for rank in range(64)]
    text = render_table(rows)
    shown = [line.split()[0] for line in text.splitlines() if line and line.split()[0].lstrip("*").isdigit()]
    assert shown == ["*63", "62", "61", "60", "59", "58", "57", "56", "1", "0"]
    assert "(54 more)" in text


def test_stragglers_are_named() -> None:
    rows = [cpu_row(rank, step_time_s=0.1) for rank in range(4)] + [cpu_row(4, step_time_s=0.13, host="node9")]
    assert [(slow.name, round(slow.ratio, 2)) for slow in summary(rows).stragglers] == [("4@node9", 1.3)]
    assert "slow: rank 4@node9 is busy for 1.30 × the median of a step" in render_table(rows)
    assert not summary(rows[:4]).stragglers
    assert summary(rows).spreads["step_time_s"].mean == pytest.approx(0.106)
    assert summary([cpu_row(0, step_time_s=0.0)]).spreads["step_time_s"].skew == 1.0, "equal ranks, as any zeros"


def test_one_rank_has_no_spread_and_no_mark() -> None:
    text = render_table([cpu_row(0)])
    assert "*" not in text
    assert "held in host memory" not in text
    assert "max / mean" not in text


def test_narrow_terminals_lose_columns_that_say_least_and_never_digits() -> None:
    rows = [replace(gpu_row(rank), alloc_retries=0) for rank in range(2)]
    wide, narrow = render_table(rows), render_table(rows, width=80)
    assert "node1" in line_of(wide, "*0")
    table = [line for line in narrow.splitlines() if "max / mean" not in line]
    assert max(len(line) for line in table) <= 80
    assert line_of(narrow, "*0") == ["*0", *line_of(wide, "*0")[2:-2], "500.0"]
    assert line_of(render_table(rows, width=20), "*0")[-1] == "500.0"


def test_quantized_weights_have_a_column_where_a_rank_has_some() -> None:
    assert "quantized" not in render_table([cpu_row(0)])
    row = cpu_row(0)
    packed = replace(row, state={**row.state, "quantized": StateBytes(7 * MIB, 0)})
    text = render_table([packed], width=200)
    assert "quantized" in text and "7.00" in line_of(text, "0")


def test_a_file_without_the_category_of_quantized_weights_is_read(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    row = cpu_row(0)
    state = {kind: n_bytes for kind, n_bytes in row.state.items() if kind != "quantized"}
    write_jsonl(path, 1, [replace(row, state=state)])
    ((_, (old,)),) = read_jsonl(path)
    assert "quantized" not in (old.state or {}) and quantized_bytes(old) == 0
    assert line_of(render_table([old]), "0") == line_of(render_table([row]), "0")


def test_file_gives_back_what_was_gathered(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    for step in (1, 10):
        assert write_jsonl(path, step, [cpu_row(0), gpu_row(1)])
    assert list(read_jsonl(path)) == [(step, [cpu_row(0), gpu_row(1)]) for step in (1, 10)]


def test_damaged_and_foreign_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    path.write_text('{"schema": 1, "step"')
    with pytest.raises(DataError, match=r"memory.jsonl:1 is not a memory record"):
        list(read_jsonl(path))
    path.write_text('{"schema": 99}\n')
    with pytest.raises(DataError, match="schema 99, this version reads 1 to 2"):
        list(read_jsonl(path))


def test_a_file_of_schema_1_is_read_with_the_phase_by_its_name_of_today(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    write_jsonl(path, 1, [cpu_row(0), gpu_row(1)])
    recorded = path.read_text()
    path.write_text(recorded.replace('"schema": 2', '"schema": 1').replace('"update": {', '"step": {'))
    assert path.read_text() != recorded
    assert list(read_jsonl(path)) == [(1, [cpu_row(0), gpu_row(1)])]


def test_a_full_disk_warns_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    files._warned.discard("/dev/full")
    with caplog.at_level(logging.WARNING):
        assert [write_jsonl("/dev/full", step, [cpu_row(0)]) for step in range(3)] == [False] * 3
    assert [entry.getMessage() for entry in caplog.records] == [
        "cannot write /dev/full: No space left on device; the run goes on without these lines"
    ]


def test_a_line_cut_short_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    assert write_jsonl(path, 1, [cpu_row(0)])
    before = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 100, limits[1]))
    try:
        assert not write_jsonl(path, 2, [cpu_row(0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert write_jsonl(path, 3, [cpu_row(0)])
    assert [step for step, _ in read_jsonl(path)] == [1, 3]


def test_a_path_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file or directory"):
        write_jsonl(tmp_path / "missing" / "memory.jsonl", 1, [cpu_row(0)])


def test_missing_times_and_states_show_as_dashes() -> None:
    text = render_table([replace(cpu_row(0), step_time_s=None, state=None)])
    assert line_of(text, "0")[2:6] == ["–"] * 4
    assert line_of(text, "0")[-1] == "–"


def test_a_difference_that_costs_no_time_is_not_called_slow() -> None:
    rows = [replace(cpu_row(rank, step_time_s=0.5), busy_s=0.01 if rank else 0.02) for rank in range(3)]
    assert not summary(rows).stragglers


GIB = 2**30


def test_each_node_has_its_own_spread_and_worst_rank() -> None:
    rows = [gpu_row(0, 2 * GIB, "a"), gpu_row(1, 4 * GIB, "a"), gpu_row(2, 6 * GIB, "b"), gpu_row(3, 6 * GIB, "b")]
    found = summary(rows)
    assert found.spreads["peak_allocated"] == Spread(6 * GIB, 2 * GIB, 4.5 * GIB, 6 / 4.5, "2@b")
    assert list(found.nodes) == ["a", "b"]
    assert found.nodes["a"]["peak_allocated"] == Spread(4 * GIB, 2 * GIB, 3 * GIB, 4 / 3, "1@a")
    assert found.nodes["b"]["peak_allocated"].skew == 1.0
    assert found.peak == ("peak_allocated", found.spreads["peak_allocated"])


def test_on_the_cpu_ranks_are_compared_by_rss() -> None:
    found = summary([cpu_row(0, 300 * MIB), cpu_row(1, 500 * MIB)])
    assert (found.peak[0], found.peak[1].worst) == ("peak_rss", "1@node1")
    assert summary([]).peak is None


def test_the_table_has_a_line_per_node_the_worst_first() -> None:
    rows = [gpu_row(0, 2 * GIB, "a"), gpu_row(1, 4 * GIB, "a"), gpu_row(2, 6 * GIB, "b")]
    nodes = [line for line in render_table(rows).splitlines() if line.startswith("node ")]
    assert [line.split()[1] for line in nodes] == ["b:", "a:"]
    assert "max 4.00 GiB (rank 1@a), min 2.00 GiB, max / mean 1.33" in nodes[1]
    assert not any(line.startswith("node ") for line in render_table(rows[:2]).splitlines())


def test_of_many_nodes_only_the_worst_have_a_line() -> None:
    rows = [gpu_row(rank, (1 + rank) * GIB, f"host{rank}") for rank in range(20)]
    lines = render_table(rows).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("node ")] == [f"host{n}:" for n in range(19, 11, -1)]
    assert "(12 more nodes)" in lines


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """`shardkit.memory.summary(rows)`, as docs/memory.md has it, whatever was imported before."""
    folder = Path(shardkit.memory.__file__).parent
    assert [name for name in shardkit.memory.__all__ if (folder / f"{name}.py").exists()] == []
    assert shardkit.memory.summary is summary
