from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.errors import ConfigError, TrainingError
from shardkit.launch.failures import exit_codes
from shardkit.launch.failures.failure import (
    Failure,
    exit_code_of,
    explain,
    in_srun_log,
    in_torchrun_log,
    merged,
    oom_kills_in_srun_log,
    read,
    record,
    with_last_words,
)

# As torchrun 2.9 to 2.13 writes it.
TORCHRUN = """
============================================================
shardkit.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_10:00:01
  host      : n2
  rank      : 3 (local_rank: 1)
  exitcode  : 1 (pid: 11)
  error_file: /x/error.json
  traceback : Traceback (most recent call last):
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  host      : n1
  rank      : 2 (local_rank: 0)
  exitcode  : -9 (pid: 10) (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 10
============================================================
"""


def recorded(folder: Path, rank: int, error: BaseException) -> Path:
    try:
        raise error
    except BaseException as caught:
        path = record(caught, {"TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json"), "RANK": str(rank)})
    assert path is not None
    return path


def test_the_rank_that_lost_its_peer_is_not_blamed_though_it_was_first(tmp_path: Path) -> None:
    peer = recorded(tmp_path, 0, RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:51363"))
    origin = recorded(tmp_path, 1, ValueError("bad sample"))
    failures = read([peer, origin])
    assert [failure.rank for failure in failures] == [1, 0]
    shown = explain(failures, "LOGS")
    assert "error: rank 1 failed: ValueError: bad sample" in shown and "in recorded" in shown
    assert "1 other rank(s) ended because of it: 0" in shown and "Connection closed" not in shown
    assert shown.endswith("logs: LOGS")


def test_a_killed_rank_comes_before_an_exception_of_a_peer(tmp_path: Path) -> None:
    lost = recorded(tmp_path, 3, RuntimeError("Connection reset by peer"))
    failures = merged(read([lost]), in_torchrun_log(TORCHRUN))
    assert [(f.rank, f.exit_code) for f in failures] == [(2, -9), (3, 1)]
    assert exit_code_of(failures) == 137
    assert "out of host memory: the kernel killed 1 process" in explain(failures, "L", oom_kills=1)


def test_user_errors_are_two_lines(tmp_path: Path) -> None:
    failures = read([recorded(tmp_path, rank, ConfigError("x=1", "set x=2")) for rank in (0, 1)])
    assert explain(failures, "L") == "error: x=1\n  fix: set x=2"
    assert exit_code_of(failures) == 2


def test_a_run_that_went_wrong_keeps_its_fix_and_its_logs(tmp_path: Path) -> None:
    failures = read([recorded(tmp_path, 0, TrainingError("loss is nan", "lower optim.lr"))])
    assert explain(failures, "L").splitlines() == ["error: loss is nan", "  fix: lower optim.lr", "  logs: L"]
    assert exit_code_of(failures) == 1


def test_a_rank_that_torchrun_had_to_kill_does_not_hide_why_the_job_ended(tmp_path: Path) -> None:
    watchdog = recorded(tmp_path, 0, TrainingError("no progress for 4 s: rank 2 did not answer", "see the stacks"))
    failures = merged(read([watchdog]), in_torchrun_log(TORCHRUN))
    assert explain(failures, "L").startswith("error: no progress for 4 s")
    assert exit_code_of(failures) == 1


def test_a_rank_that_was_killed_before_the_others_missed_it_is_the_cause(tmp_path: Path) -> None:
    """On GPUs they wait for it, deaf to torchrun's signals, until their watchdog ends them."""
    silence = TrainingError(
        "no progress for 5 s at step 3; rank(s) 2 did not even answer: stopped, dead", "see the stacks"
    )
    failures = merged(read([recorded(tmp_path, 0, silence)]), in_torchrun_log(TORCHRUN))
    assert (failures[0].rank, failures[0].exit_code) == (2, -9)
    later = TORCHRUN.replace("2026-01-01", "2099-01-01")  # a rank that was stopped, and killed because it did not end
    failures = merged(read([recorded(tmp_path, 0, silence)]), in_torchrun_log(later))
    assert explain(failures, "L").startswith("error: no progress for 5 s")


def test_a_rank_that_torchrun_had_to_kill_does_not_hide_another_ranks_exception(tmp_path: Path) -> None:
    own_file = recorded(tmp_path, 3, RuntimeError("CUDA error: unknown error"))
    forced = "Unable to shutdown process 10 via SIGTERM, forcefully exiting via SIGKILL\n" + TORCHRUN
    failures = merged(read([own_file]), in_torchrun_log(forced))
    assert [failure.rank for failure in failures] == [3, 2]
    shown = explain(failures, "L")
    assert "error: rank 3 failed: RuntimeError: CUDA error: unknown error" in shown
    assert "likely cause: its GPU failed" in shown and "Xid" in shown


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "[rank2]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5) ran for 6000 milliseconds\n",
            ["Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "NCCL's watchdog after a collective"],
        ),
        (  # since torch 2.15
            "[rank2]:[E WorkNCCL.cpp:372] [TC][rank=2][name=0] Operation timed out after 6001 ms\n",
            ["(exit code -6): Operation timed out after 6001 ms\n", "NCCL's watchdog after a collective"],
        ),
        (
            "what(): [Rank 2] terminated with exception: CUDA error: unspecified launch failure\nmore\n",
            ["(exit code -6): CUDA error: unspecified launch failure\n", "likely cause: its GPU failed"],
        ),
        ("nothing of use\n", ["killed by SIGABRT (exit code -6)\n", "native code gave up"]),
    ],
)
def test_what_a_library_wrote_before_it_aborted_is_shown(log: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "stderr.log").write_text(log)
    aborted = TORCHRUN.replace("-9 (pid: 10) (SIGKILL)", "-6 (pid: 10) (SIGABRT)")
    lost = read([recorded(tmp_path, 3, RuntimeError("Connection reset by peer"))])
    shown = explain(merged(lost, with_last_words(in_torchrun_log(aborted), tmp_path)), "L")
    assert shown.startswith("error: rank 2 failed: killed by SIGABRT")
    for word in words:
        assert word in shown


def test_only_lost_peers_point_elsewhere(tmp_path: Path) -> None:
    failures = read([recorded(tmp_path, 0, RuntimeError("Connection closed by peer"))])
    assert "the first error is on another node" in explain(failures, "L")


def test_files_of_other_programs_and_half_written_ones(tmp_path: Path) -> None:
    folder = tmp_path / "4"
    folder.mkdir()
    foreign = folder / "error.json"
    foreign.write_text(
        json.dumps({"message": {"message": "E: x", "extraInfo": {"py_callstack": "T", "timestamp": "7"}}})
    )
    (tmp_path / "half").write_text('{"message": ')
    (failure,) = read([foreign, tmp_path / "half", tmp_path / "missing"])
    assert failure == Failure(4, 1, 7.0, "E: x", "T")


def test_a_newer_images_file_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    path = recorded(tmp_path, 2, ConfigError("x=1", "set x=2"))
    data = json.loads(path.read_text())
    data["shardkit"]["thread"] = "loader"
    path.write_text(json.dumps(data))
    (tmp_path / "less.json").write_text(json.dumps({"shardkit": {"message": "?"}}))
    (tmp_path / "other.json").write_text(json.dumps({"shardkit": ["?"]}))
    (rank_failure,) = read(sorted(tmp_path.glob("*.json")))
    assert (rank_failure.rank, rank_failure.message, rank_failure.fix) == (2, "x=1", "set x=2")


SRUN = """srun: error: n2: task 1: {first}
srun: Terminating StepId=7.0
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T04:09:52 ***
srun: error: n1: tasks 0,2-3: {then}
"""


@pytest.mark.parametrize(
    ("first", "then", "code", "said"),
    [
        ("Killed", "Terminated", 137, "rank 1 failed: killed by SIGKILL (exit code 137)"),
        ("Killed", "Exited with exit code 1", 137, "rank 1 failed: killed by SIGKILL"),
        ("Out Of Memory", "Killed", 137, "out of host memory: the kernel killed 1 process"),
        ("Segmentation fault (core dumped)", "Killed", 139, "rank 1 failed: killed by SIGSEGV"),
        ("Exited with exit code 7", "Killed", 7, "rank 1 failed: exit code 7"),
    ],
)
def test_the_first_task_that_srun_reports_gives_the_code(
    first: str, then: str, code: int, said: str, tmp_path: Path
) -> None:
    """Its peers only lost it, whatever they say."""
    lost = recorded(tmp_path, 0, RuntimeError("Connection reset by peer"))
    text = SRUN.format(first=first, then=then)
    failures = merged(read([lost]), in_srun_log(text))
    assert exit_code_of(failures) == code
    assert said in explain(failures, "L", oom_kills_in_srun_log(text))


def test_what_a_rank_says_itself_counts_more_than_what_srun_reports(tmp_path: Path) -> None:
    own_file = recorded(tmp_path, 1, ValueError("bad sample"))
    failures = merged(read([own_file]), in_srun_log(SRUN.format(first="Exited with exit code 1", then="Killed")))
    assert "error: rank 1 failed: ValueError: bad sample" in explain(failures, "L") and exit_code_of(failures) == 1


def test_processes_killed_for_want_of_memory_are_counted_in_the_cgroup(tmp_path: Path) -> None:
    """The machine's own count holds other jobs' as well."""
    for folder in ("proc/self", "sys/fs/cgroup/job_7", "sys/fs/cgroup/memory/job_7"):
        (tmp_path / folder).mkdir(parents=True)
    assert exit_codes.oom_kill_count(tmp_path) == 0
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 5\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job_7\n")
    assert exit_codes.oom_kill_count(tmp_path) == 5
    (tmp_path / "sys/fs/cgroup/job_7/memory.events").write_text("oom 3\noom_kill 2\n")
    assert exit_codes.oom_kill_count(tmp_path) == 2
    (tmp_path / "proc/self/cgroup").write_text("8:cpu:/job_7\n7:memory:/job_7\n")
    (tmp_path / "sys/fs/cgroup/memory/job_7/memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    assert exit_codes.oom_kill_count(tmp_path) == 1


def test_torch_can_read_our_file(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = recorded(tmp_path, 1, ValueError("bad"))
    assert "ValueError: bad" in str(ProcessFailure(1, 10, 1, str(path)).message)


def test_torchrun_shows_cause_and_fix_of_a_user_error_and_no_traceback(tmp_path: Path) -> None:
    error = recorded(tmp_path, 0, ConfigError("2 ranks do not suit single", "set parallel.strategy=ddp"))
    shown = json.loads(error.read_text())["message"]["extraInfo"]["py_callstack"]
    assert shown == "2 ranks do not suit single\n  fix: set parallel.strategy=ddp"
    crash = recorded(tmp_path, 1, ValueError("bad"))
    assert "Traceback" in json.loads(crash.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    ("code", "text", "cause"),
    [
        (-9, "killed by SIGKILL (exit code -9)", "memory"),
        (137, "killed by SIGKILL (exit code 137)", "memory"),
        (143, "killed by SIGTERM (exit code 143)", "scheduler"),
        (-11, "killed by SIGSEGV (exit code -11)", "native code"),
        (-6, "killed by SIGABRT (exit code -6)", "NCCL's watchdog"),
        (-7, "killed by SIGBUS (exit code -7)", "/dev/shm"),
        (1, "exit code 1", ""),
        (255, "exit code 255", ""),
    ],
)
def test_exit_codes_are_decoded(code: int, text: str, cause: str) -> None:
    assert exit_codes.describe(code) == text
    assert cause in exit_codes.likely_cause(code)[0]


def test_what_other_ranks_wrote_moves_no_cursor(tmp_path: Path) -> None:
    """Text of a rank, and names of files, may hold escape sequences: they are shown, line by line, not obeyed."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\u202e"
    rank = recorded(tmp_path, 1, ValueError(f"bad sample {evil}\nof two lines"))
    for failures in (read([rank]), read([recorded(tmp_path, 0, TrainingError(f"loss {evil}", f"lower {evil}"))])):
        shown = explain(failures, f"logs{evil}", memory={1: [f"  post-mortem: {evil}"]})
        assert all(char.isprintable() or char == "\n" for char in shown), repr(shown)
        assert r"\x1b]0;owned" in shown
    assert "bad sample" in explain(read([rank]), "L") and "of two lines" in explain(read([rank]), "L")
