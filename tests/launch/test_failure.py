from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigError, OutOfMemoryError, TrainingError
from shardkit.launch.failures import exit_codes
from shardkit.launch.failures.failure import (
    Failure,
    exit_code_of,
    explain,
    in_srun_log,
    in_torchrun_log,
    memory_words,
    merged,
    oom_kills_in_srun_log,
    read,
    read_post_mortems,
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
    return path


LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:51363")
BAD = ValueError("bad sample")
SILENT = TrainingError("no progress for 5 s at step 3; rank(s) 2 did not even answer: stopped", "see the stacks")
STUCK = TrainingError("no progress for 4 s: rank 2 did not answer", "see the stacks")
FORCED = "Unable to shutdown process 10 via SIGTERM, forcefully exiting via SIGKILL\n" + TORCHRUN
LATER = TORCHRUN.replace("2026-01-01", "2099-01-01")
SRUN = """srun: error: n2: task 1: {}
srun: Terminating StepId=7.0
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T04:09:52 ***
srun: error: n1: tasks 0,2-3: {}
"""
Case = tuple[dict[int, BaseException], str, int, str, list[str]]
CASES: dict[str, Case] = {
    "a rank that lost its peer is not blamed though it was first": (
        {0: LOST, 1: BAD}, "", 1, "error: rank 1 failed: ValueError: bad sample\n",
        ["in recorded", "1 other rank(s) ended because of it: 0", "\n  logs: L"]),
    "only lost peers": ({0: LOST}, "", 1, "", ["the first error is on another node"]),
    "a killed rank comes before an exception of a peer": ({3: LOST}, TORCHRUN, 137, "error: rank 2 failed: killed", []),
    "a user's error is two lines": (
        dict.fromkeys((0, 1), ConfigError("x=1", "set x=2")), "", 2, "error: x=1\n  fix: set x=2", []),
    "a run that went wrong keeps its fix and its logs": (
        {0: TrainingError("loss is nan", "lower lr")}, "", 1, "error: loss is nan\n  fix: lower lr\n  logs: L", []),
    "a rank that torchrun had to kill does not hide why the job ended": (
        {0: STUCK}, TORCHRUN, 1, "error: no progress for 4 s", []),
    # On GPUs they wait for it, deaf to torchrun's signals, until their watchdog ends them.
    "a rank that was killed before the others missed it": ({0: SILENT}, TORCHRUN, 137, "error: rank 2 failed", []),
    "a stopped rank, killed because it did not end": ({0: SILENT}, LATER, 1, "error: no progress for 5 s", []),
    "a rank that does not answer because it raised": (
        {3: BAD, 0: SILENT}, "", 1, "error: rank 3 failed: ValueError: bad sample", []),
    "nor another rank's exception": (
        {3: RuntimeError("CUDA error: unknown error")}, FORCED, 1,
        "error: rank 3 failed: RuntimeError: CUDA error: unknown error", ["likely cause: its GPU failed", "Xid"]),
    # The first task that srun reports gives the code, whatever its peers say.
    "srun, killed": ({0: LOST}, SRUN.format("Killed", "Terminated"), 137, "error: rank 1 failed: killed", []),
    "srun, others failed": ({0: LOST}, SRUN.format("Killed", "Exited with exit code 1"), 137, "error: rank 1", []),
    "srun, memory": ({0: LOST}, SRUN.format("Out Of Memory", "Killed"), 137, "", ["the kernel killed 1 process"]),
    "srun, crashed": (
        {0: LOST}, SRUN.format("Segmentation fault (core dumped)", "Killed"), 139,
        "error: rank 1 failed: killed by SIGSEGV", []),
    "srun, exit code": (
        {0: LOST}, SRUN.format("Exited with exit code 7", "Killed"), 7, "error: rank 1 failed: exit code 7", []),
    "what a rank says itself counts more": (
        {1: BAD}, SRUN.format("Exited with exit code 1", "Killed"), 1, "error: rank 1 failed: ValueError: bad", []),
}  # fmt: skip
"""What ranks recorded, a log of torchrun or srun, the job's exit code, and how its explanation begins and goes on."""


@pytest.mark.parametrize(("errors", "log", "code", "begins", "words"), CASES.values(), ids=CASES)
def test_the_failure_that_ended_the_job_is_told(
    errors: dict[int, BaseException], log: str, code: int, begins: str, words: list[str], tmp_path: Path
) -> None:
    by_launcher = in_srun_log(log) if "srun" in log else in_torchrun_log(log)
    failures = merged(read([recorded(tmp_path, rank, error) for rank, error in errors.items()]), by_launcher)
    shown = explain(failures, "L", oom_kills_in_srun_log(log))
    assert exit_code_of(failures) == code
    assert f"\n{begins}" in f"\n{shown}" and all(word in shown for word in words), shown
    assert code != 2 or shown == begins
    assert "Connection closed" not in shown or len(errors) == 1


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


def test_the_groups_in_which_the_others_waited_are_named(tmp_path: Path) -> None:
    def failed(rank: int, error: BaseException, groups: Any) -> Path:
        with pytest.raises(type(error)) as raised:
            raise error
        environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / f"{rank}.json"), "RANK": str(rank)}
        return record(raised.value, environ, groups)

    paths = [
        failed(0, RuntimeError("Broken pipe"), [("tp", [0, 1], 8), ("dp_shard", [0, 2], 5)]),
        failed(2, LOST, [("tp", [2, 3], 8), ("dp_shard", [0, 2], 4)]),
        failed(3, BAD, [("tp", [2, 3], 7), ("dp_shard", [1, 3], 4)]),
    ]
    shown = explain(read(paths), "L")
    assert (
        "\n  2 other rank(s) ended because of it: 0, 2\n  in the group tp (ranks 2, 3) rank 2 waited for it\n" in shown
    )
    assert "dp_shard" not in shown, "rank 0 waited for rank 2"


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


def test_torchrun_shows_cause_and_fix_of_a_user_error_and_no_traceback(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    error = recorded(tmp_path, 0, ConfigError("2 ranks do not suit single", "set parallel.strategy=ddp"))
    shown = json.loads(error.read_text())["message"]["extraInfo"]["py_callstack"]
    assert shown == "2 ranks do not suit single\n  fix: set parallel.strategy=ddp"
    crash = recorded(tmp_path, 1, ValueError("bad"))
    assert "Traceback" in json.loads(crash.read_text())["message"]["extraInfo"]["py_callstack"]
    assert "ValueError: bad" in str(ProcessFailure(1, 10, 1, str(crash)).message), "torch reads it"


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


GIB = 2**30


def left(run_dir: Path, rank: int, when: float = 100.0, kind: str = "device", **more: Any) -> None:
    changes = [("activation.policy=full", 18 * GIB), ("parallel.strategy=fsdp", 2 * GIB), ("x=1", None), ("y=1", None)]
    record = {
        "schema": 1, "kind": kind, "time": when, "rank": rank, "host": f"n{rank}", "step": 20,
        "memory": {"limit": 64 * GIB, "free": 2 * GIB, "missing": 4 * GIB},
        "row": {"host_mem": {"rss": 20 * GIB, "children_rss": 10 * GIB}},
        "advice": [{"change": c, "saving_bytes": s, "cost": "slower", "why": "w"} for c, s in changes],
        **more,
    }  # fmt: skip
    (run_dir / "oom").mkdir(exist_ok=True)
    (run_dir / "oom" / f"rank{rank}.json").write_text(json.dumps(record))


def test_the_best_changes_take_the_place_of_the_fix(tmp_path: Path) -> None:
    left(tmp_path, 1)
    failures = read([recorded(tmp_path, rank, OutOfMemoryError(f"rank {rank} ran out", "set a=b")) for rank in (1, 2)])
    assert exit_code_of(failures) == exit_codes.OUT_OF_MEMORY
    shown = explain(failures, "LOGS", memory=memory_words(failures, read_post_mortems(tmp_path, 50)))
    assert shown.splitlines() == [
        "error: rank 1 ran out",
        "  what would help, and what it costs:",
        "    activation.policy=full  saves 18.0 GiB: slower",
        "    parallel.strategy=fsdp  saves 2.0 GiB (not enough alone): slower",
        "    x=1                     saves memory: slower",
        f"  post-mortem: {tmp_path}/oom/rank1.json",
        "  out of memory as well: rank(s) 2",
        "  logs: LOGS",
    ]
    shown = explain(failures[:1], "LOGS", memory=memory_words(failures[:1], {}))
    assert shown.splitlines() == ["error: rank 1 ran out", "  fix: set a=b", "  logs: LOGS"], "no file was left"


def test_files_of_earlier_attempts_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    left(tmp_path, 0, when=49.9)
    left(tmp_path, 1, when=50.0)
    left(tmp_path, 2, schema=99)
    (tmp_path / "oom/rank3.json").write_text('{"schema": 1, "time": 60')
    (tmp_path / "oom/rank4.json").write_text("[]")
    (tmp_path / "oom/rank1.json.part7").write_text("draft")
    assert set(read_post_mortems(tmp_path, 50)) == {1}
    assert read_post_mortems(tmp_path / "elsewhere", 0) == {}


def test_a_killed_rank_is_explained_by_what_it_saw_coming(tmp_path: Path) -> None:
    left(tmp_path, 1, kind="host-risk")
    killed = Failure(1, -9, message=exit_codes.describe(-9))
    shown = explain([killed], "LOGS", 1, memory_words([killed], read_post_mortems(tmp_path, 50)))
    assert "out of host memory: the kernel killed 1 process" in shown
    assert re.search(r"step 20: 62.0 GiB of 64.0 GiB on n1; rank 1 held 20.0 GiB, .* 10.0 GiB", shown)
    assert "activation.policy=full" in shown and "dmesg" not in shown
    neighbour = Failure(2, 137)
    assert "rank 1 held" in memory_words([neighbour], read_post_mortems(tmp_path, 50))[2][0], "it saw it coming as well"


def test_a_killed_rank_without_a_word_keeps_the_general_advice(tmp_path: Path) -> None:
    killed = Failure(1, -9, message=exit_codes.describe(-9))
    assert "dmesg" in explain([killed], "LOGS", memory=memory_words([killed], read_post_mortems(tmp_path, 50)))
    left(tmp_path, 0, kind="device")
    assert memory_words([Failure(1, -9)], read_post_mortems(tmp_path, 50)) == {}
