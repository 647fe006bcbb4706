"""What a run or a launched script left is read whole; what is damaged is named and left out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from shardkit.cli.__main__ import main
from shardkit.errors import DataError
from shardkit.launch.failures import job_starts
from shardkit.report import measure, read
from shardkit.report.page import read_script
from shardkit.report.read import read_run
from tests.commands import python_m
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


TORCHRUN = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  host      : n1
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 10)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org
"""
TRACE = 'Traceback (most recent call last):\n  File "bad.py", line 3, in <module>\nValueError: boom <b>\n'


def launched(run_dir: Path, time: str, failed: bool) -> Path:
    """The logs of one start of two ranks, as the launcher leaves them."""
    folder = run_dir / "logs" / f"20260101-{time}-node0-77"
    for rank in range(2):
        logs = folder / "shardkit_x" / "attempt_0" / str(rank)
        logs.mkdir(parents=True)
        (logs / "stderr.log").write_text(TRACE if failed and rank == 1 else "")
    (folder / "torchrun.log").write_text(TORCHRUN if failed else "")
    return folder


def test_it_shows_the_starts_the_failing_rank_and_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched(tmp_path / "run", "100000", failed=False)
    last = launched(tmp_path / "run", "110000", failed=True)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "run")])
    assert ended.value.code == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"rank 1 failed: ValueError: boom <b>; report: {tmp_path / 'run/report.html'}"]
    page = (tmp_path / "run/report.html").read_text()
    assert "2026-01-01 10:00:00" in page and "2026-01-01 11:00:00" in page
    assert "rank 1: ValueError: boom &lt;b&gt;" in page and "exit code 1" in page
    assert str(last / "shardkit_x/attempt_0/1/stderr.log") in page


@pytest.mark.slow
def test_a_real_start_that_failed_is_shown(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')\n")
    script = ["--nproc-per-node", 2, "--run-dir", tmp_path / "run", "--", tmp_path / "bad.py"]
    assert python_m("shardkit.cli", "launch", *script).returncode == 1
    found = read_script(tmp_path / "run")
    assert found is not None and len(found.starts) == 1
    first = found.starts[0].failures[0]
    assert (first.rank, first.message) == (1, "ValueError: boom")
    log = found.starts[0].log_of(first)
    assert log is not None and "ValueError: boom" in log.read_text()


def test_the_run_of_a_config_and_an_empty_directory_are_no_scripts(tmp_path: Path) -> None:
    assert read_script(write_run(tmp_path / "run")) is None
    (tmp_path / "empty/logs").mkdir(parents=True)
    assert read_script(tmp_path / "empty") is None
