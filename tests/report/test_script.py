"""The report of a directory that `shardkit launch -- script` made."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.cli.__main__ import main
from shardkit.report.script import read_script
from tests.commands import python_m
from tests.report.samples import write_run

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
