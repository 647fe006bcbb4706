"""What `logs` shows of a job and of an array's tasks, by what Slurm's commands print."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import pytest

from shardkit.errors import LaunchError
from shardkit.launch.slurm import queue
from tests.texts import write_program

SCONTROL = """#!/bin/bash
echo "JobId=9 ArrayJobId=7 ArrayTaskId=10 JobState=RUNNING"
echo "   Comment=shardkit {run} "
echo "   StdOut={run}/logs/slurm-7_%a.out"
"""
# The first look finds the array running, while its tasks write; the second one finds that it has ended.
SQUEUE = """#!/bin/bash
if [ -e {looked} ]; then exit 0; fi
touch {looked}
printf ' of step 2\\n\\nlast' >> {logs}/slurm-7_2.out
echo "step 1" > {logs}/slurm-7_10.out
echo RUNNING
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of array 7, whose first task has written a line and a half."""
    logs, programs = tmp_path / "run/logs", tmp_path / "bin"
    logs.mkdir(parents=True)
    for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE)):
        write_program(programs / name, text.format(run=tmp_path / "run", logs=logs, looked=tmp_path / "looked"))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (logs / "slurm-7_2.out").write_text("step 1\nhalf")
    (logs / "slurm-8_2.out").write_text("another array's\n")
    return tmp_path / "run"


def test_the_logs_of_an_array_are_those_of_all_its_tasks_with_their_index(run: Path) -> None:
    (run / "logs/slurm-7_3.out").write_text("\n")
    out = BytesIO()
    queue.show_logs("7", follow=False, out=out)
    assert out.getvalue().decode() == "2: step 1\n3: \n2: half\n"


def test_an_array_is_followed_until_all_tasks_have_ended(run: Path) -> None:
    out = BytesIO()
    queue.show_logs("7", follow=True, out=out)
    lines = out.getvalue().decode().splitlines()
    assert [line for line in lines if line.startswith("2")] == ["2: step 1", "2: half of step 2", "2: ", "2: last"]
    assert [line for line in lines if not line.startswith("2")] == ["10: step 1"]


def test_the_logs_of_one_task_are_asked_for_by_number_or_directory(run: Path) -> None:
    (run / "array_2").mkdir()
    os.utime(run / "logs/slurm-8_2.out", (0, 0))  # of an earlier submission
    for name in ("7_2", str(run / "array_2")):
        out = BytesIO()
        queue.show_logs(name, follow=False, out=out)
        assert out.getvalue() == b"step 1\nhalf", name


def test_an_array_that_has_not_started_says_so(run: Path) -> None:
    (run / "logs/slurm-7_2.out").unlink()
    with pytest.raises(LaunchError, match="no task of array 7 has written to") as caught:
        queue.show_logs("7", follow=False, out=BytesIO())
    assert "shardkit jobs" in caught.value.fix


def test_a_pipe_in_place_of_an_output_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "slurm-7.out")
    with pytest.raises(LaunchError, match=r"slurm-7\.out is not a regular file"):
        queue.show_logs(str(tmp_path), follow=False)


def test_an_output_is_shown_but_controls_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    line = "x" * 5000
    (tmp_path / "logs" / "slurm-7.out").write_bytes(
        b"\x1b[2Jstep 1\rstep 2 \xe2\x86\x92 \xff\r\n" + line.encode() + b"\nend"
    )
    out = BytesIO()
    queue.show_logs(str(tmp_path), follow=False, out=out)
    assert out.getvalue().decode() == f"\\x1b[2Jstep 1\nstep 2 → \\xff\n{line}\nend"
