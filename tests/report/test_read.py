"""What a run left is read whole; what is damaged is named and left out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from shardkit.errors import DataError
from shardkit.launch.failures import job_starts
from shardkit.report import measure, read
from shardkit.report.read import read_run
from tests.memory.samples import MIB
from tests.report.samples import add, trace, write_run


def test_a_whole_run_is_read_without_a_note(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.notes == []
    assert [entry["step"] for entry in run.metrics] == list(range(1, 21))
    assert [gather.step for gather in run.gathers] == [1, 5, 10, 15, 20]
    assert [row.host_mem.peak_rss for row in run.last_rows] == [320 * MIB, 321 * MIB]
    assert run.setting("parallel.strategy") == "fsdp"


def test_a_torn_last_line_is_left_out_and_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "memory.jsonl"):
        text = (path / name).read_text()
        (path / name).write_text(text[:-30])
    run = read_run(path)
    assert run.metrics[-1]["step"] == 19
    assert run.gathers[-1].step == 15
    assert run.notes == [
        f"{name}: the last line was cut short, and is left out" for name in ("metrics.jsonl", "memory.jsonl")
    ]


def test_files_that_are_missing_or_of_another_version_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "env.json").unlink()
    (path / "metrics.jsonl").unlink()
    text = (path / "memory.jsonl").read_text().splitlines()
    text[1] = json.dumps({**json.loads(text[1]), "schema": 99})
    text[2] = json.dumps({"schema": 1, "step": 10})
    (path / "memory.jsonl").write_text("\n".join(text) + "\n")
    (path / "config.yaml").write_text("a: [")
    (path / "plan.json").write_text("[1]")
    run = read_run(path)
    assert (run.config, run.environment, run.metrics, run.plan) == ({}, {}, [], None)
    assert [gather.step for gather in run.gathers] == [1, 15, 20]
    told = "\n".join(run.notes)
    assert all(
        word in told for word in ("env.json: No such file", "metrics.jsonl: No such", "config.yaml:", "plan.json")
    )
    assert "memory.jsonl: 2 lines are not records of schema 1 to 2" in told


def test_a_config_that_takes_quadratic_time_to_parse_is_noted_at_once(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.yaml").write_text("[" * 100_000)  # PyYAML alone: minutes
    began = time.process_time()
    run = read_run(path)
    assert time.process_time() - began < 10
    assert run.config == {} and "nested" in run.notes[0]


def test_of_very_many_gathers_a_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run", steps=500, wanted=500)
    monkeypatch.setattr(read, "ROWS", 20)
    run = read_run(path)
    assert len(run.gathers) == 11  # of 101 of two ranks
    assert run.gathers[-1].step == 500
    assert run.notes == ["memory.jsonl: only every 10th of its many gathers is shown, and the last"]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="not a directory"):
        read_run(tmp_path / "absent")


def test_ranks_files_are_found_by_number(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    notes = {"trace/rank_notes.json": {}, "trace/rank²3.json": {}}
    add(path, {f"trace/rank{rank}.json": trace(rank) for rank in (10, 2)} | notes)
    assert list(read_run(path).traces) == [2, 10]


def test_why_earlier_starts_ended_is_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    job_starts.note_restart(path, "local rank 1: killed by SIGKILL (exit code -9)")
    job_starts.note_start(path, "77", 0, "n[1-2]")
    job_starts.note_end(path, "77", 0, "saved after USR2")
    job_starts.note_start(path, "77", 1, "n[1-2]")
    assert read_run(path).restarts == ["saved after USR2", "step 20: local rank 1: killed by SIGKILL (exit code -9)"]


def test_what_ended_the_last_launch_is_the_status(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=8)
    assert measure.status(read_run(path)) == (False, "not finished: step 8 of 20")
    folder = path / "logs" / "20260102" / "none_abc" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    own = {"rank": 1, "exit_code": 1, "when": 1.0, "message": "ValueError: no\nsecond line"}
    (folder / "error.json").write_text(json.dumps({"message": {"message": ""}, "shardkit": own}))
    assert measure.status(read_run(path)) == (False, "failed at step 8 of 20: rank 1: ValueError: no")
    add(path, {"oom/rank0.json": {"kind": "host-risk"}, "oom/rank2.json": {"step": 3}})  # gone on after it
    assert measure.status(read_run(path)) == (False, "failed at step 8 of 20: rank 1: ValueError: no")
    add(path, {"oom/rank3.json": {"phase": "forward", "step": 9}})
    assert measure.status(read_run(path)) == (False, "out of memory on rank 3 at step 8 of 20")
    finished = write_run(tmp_path / "finished")
    assert measure.status(read_run(finished)) == (True, "finished 20 of 20 steps")
