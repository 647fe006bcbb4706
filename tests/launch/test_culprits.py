"""The rank that ended first is named, whatever ended it; the other ranks only ended because of it."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.launch.failures.failure import (
    Failure,
    exit_code_after,
    exit_code_of,
    explain,
    in_srun_log,
    in_torchrun_log,
    last_traceback,
    merged,
    of_launcher,
    read,
)
from tests.commands import environment, python_m
from tests.launch.jobs import settings
from tests.launch.test_failure import recorded
from tests.ranks import REPO

ENTRY = """
[{rank}]:
  time      : 2026-01-01_10:00:0{second}
  host      : n1
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : …
"""


def torchrun_log(*ends: tuple[int, int, int], told: tuple[int, ...] = ()) -> str:
    """A log of torchrun with (rank, exit code, second) of its ranks, and the ranks that it told to end."""
    sent = "".join(f"W0101 1 api.py:1] Sending process 10{rank} closing signal SIGTERM\n" for rank in told)
    return sent + "".join(
        ENTRY.format(rank=rank, code=code, second=second, pid=100 + rank) for rank, code, second in ends
    )


@pytest.mark.parametrize("number", [2, 15])
def test_a_rank_that_a_signal_ended_is_named_and_not_one_that_torchrun_told_to_end(number: int) -> None:
    failures = merged([], in_torchrun_log(torchrun_log((0, -15, 0), (1, -number, 1), (2, -9, 2), told=(0, 2))))
    assert failures[0].rank == 1 and exit_code_of(failures) == 128 + number
    assert "2 other rank(s) ended because of it: 0, 2" in explain(failures, "L")


def test_of_ranks_that_the_same_signal_ended_none_is_said_to_be_the_first() -> None:
    shown = explain(merged([], in_torchrun_log(torchrun_log((0, -15, 0), (1, -15, 0), (2, -15, 0), told=(2,)))), "L")
    assert "which was the first is not known" in shown and "because of it: 2" in shown


def test_a_rank_that_exits_with_0_fails_the_job_and_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"none/attempt_0/{rank}").mkdir(parents=True)
        (tmp_path / f"none/attempt_0/{rank}/stderr.log").write_text("")
    lost = 'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: Connection closed by peer\n'
    (tmp_path / "none/attempt_0/0/stderr.log").write_text(lost)
    (tmp_path / "torchrun.log").write_text(torchrun_log((0, 1, 0), (2, -15, 1), told=(2,)))
    failures = of_launcher(tmp_path)
    assert failures[0].rank == 1 and exit_code_of(failures) == 1
    assert "rank 1 failed: it ended early, with exit code 0" in explain(failures, "L")


def test_a_rank_that_was_told_to_end_while_it_ended_of_its_own_exception_is_named(tmp_path: Path) -> None:
    raised = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{}: bad\n'
    texts = {0: raised.format("RuntimeError: Connection closed by peer"), 1: raised.format("ValueError"),
             2: raised.format("KeyError") + "tried again: step 7\n"}  # fmt: skip
    for rank, text in texts.items():
        (tmp_path / f"none/attempt_0/{rank}").mkdir(parents=True)
        (tmp_path / f"none/attempt_0/{rank}/stderr.log").write_text(text)
    (tmp_path / "torchrun.log").write_text(torchrun_log((0, 1, 0), (1, -15, 1), (2, -15, 1), told=(1, 2)))
    failures = of_launcher(tmp_path)
    assert (failures[0].rank, failures[0].message, exit_code_of(failures)) == (1, "ValueError: bad", 1)


def test_srun_reports_the_tasks_of_a_line_and_those_that_it_ended_itself() -> None:
    text = "srun: error: n1: tasks 1,3: Interrupt\nsrun: error: n1: tasks 0,2: Terminated\n"
    failures = in_srun_log(text)
    assert [(f.rank, f.exit_code, f.forced) for f in failures] == [
        (1, 130, False), (3, 130, False), (0, 143, True), (2, 143, True),
    ]  # fmt: skip


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 3, in <module>
  |     raise ExceptionGroup("loaders", [])
  | ExceptionGroup: loaders (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | RuntimeError: Connection closed by peer
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 2, in <module>
    | ValueError: bad sample
    +------------------------------------
[W1122 ProcessGroup.cpp] Warning: destroy_process_group() was not called
"""


def test_a_group_of_exceptions_is_read_with_the_members_that_are_causes() -> None:
    message, trace = last_traceback(GROUP)
    assert message == "ExceptionGroup: loaders (2 sub-exceptions): ValueError: bad sample"
    assert trace.startswith("  + Exception Group") and trace.endswith("-----") and "Warning" not in trace


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs exception groups")
def test_a_group_is_recorded_with_its_members_and_is_a_lost_peer_where_all_of_them_are(tmp_path: Path) -> None:
    group = vars(builtins)["ExceptionGroup"]
    lost, bad = RuntimeError("Connection closed by peer"), ValueError("bad sample")
    (mixed,) = read([recorded(tmp_path, 1, group("loaders", [lost, group("files", [bad])]))])
    assert mixed.message.endswith("ValueError: bad sample") and not mixed.lost_peer and "bad sample" in mixed.trace
    (only_lost,) = read([recorded(tmp_path, 2, group("loaders", [lost]))])
    assert only_lost.lost_peer


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(0), 1), (SystemExit(), 1), (SystemExit("no data"), 1), (SystemExit(7), 7),
        (KeyboardInterrupt(), 130), (ValueError(), 1),
    ],
)  # fmt: skip
def test_the_exit_code_after(error: BaseException, code: int) -> None:
    assert exit_code_after(error) == code


@pytest.mark.parametrize(("how", "code"), [("exit", 1), ("interrupt", 130)])
def test_a_rank_of_a_config_records_how_it_ended(how: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    done = python_m(
        "shardkit.train",
        *settings(tmp_path / "run", how, task__args__rank=0),
        env={"TORCHELASTIC_ERROR_FILE": str(path)},
    )
    assert done.returncode == code, done.stderr
    (failure,) = read([path])
    assert failure.exit_code == code and "tests/launch/tasks.py" in failure.trace
    assert json.loads(path.read_text())["message"]


def test_a_breakpoint_without_a_terminal_is_explained() -> None:
    assert "breakpoint() found no terminal" in explain([Failure(1, 1, message="bdb.BdbQuit")], "L")


def test_an_early_end_is_no_origin_beside_a_real_failure() -> None:
    failures = merged([], [Failure(0, 0, message="it ended early"), Failure(1, 7, message="exit code 7")])
    assert failures[0].rank == 1


@pytest.mark.slow
def test_drawn_endings_name_the_rank_or_say_that_it_is_not_known(tmp_path: Path) -> None:
    """A few seeds of tests/launch/culprits.py, one for each way to end."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.culprits", "0-16"], cwd=REPO,
        env=environment({"TMPDIR": os.fspath(tmp_path)}), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
