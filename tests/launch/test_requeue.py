"""When a batch job saves, goes back to the queue, leaves out a node, or gives up. On real clusters: tests/slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.errors import LaunchError
from shardkit.launch.failures import job_starts
from shardkit.launch.failures.failure import Failure
from shardkit.launch.slurm import preemption_warning, requeue
from tests.launch.jobs import REPO, environment
from tests.texts import write_program

JOB = (
    "JobId=7 JobState={state} Reason={reason} Restarts={restarts} EndTime={end} PreemptTime={preempt} "
    "ExcNodeList={excluded} NodeList=n1"
)
ECC = Failure(rank=3, exit_code=1, message="RuntimeError: CUDA error: uncorrectable ECC error encountered", node="n4")
CRASH = Failure(rank=3, exit_code=1, message="ValueError: x", node="n4")
USER = Failure(rank=0, exit_code=2, message="sample 7 is empty", is_error=True)
UNSAVED = Failure(rank=0, exit_code=5, message="the last save, of step 9, failed: x", is_error=True)
SAVED = Failure(rank=0, exit_code=75, message="saved and stopped for SIGUSR2")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a scontrol on the path that shows `JOB` with these values; its calls go to the returned file."""

    def make(
        end: str = "Unknown", preempt: str = "None", excluded: str = "(null)", fails: str = "never", restarts: int = 0,
        state: str = "RUNNING", reason: str = "None",
    ) -> Path:  # fmt: skip
        calls, program = tmp_path / "calls", tmp_path / "bin" / "scontrol"
        shown = JOB.format(end=end, preempt=preempt, excluded=excluded, restarts=restarts, state=state, reason=reason)
        write_program(
            program,
            f'#!/bin/bash\nif [ "$1" = show ]; then echo "{shown}"; [ "$4" ] || echo "   StdErr={tmp_path}/out"\n'
            f'else echo "$*" >> {calls}; fi\n[ "$1" != {fails} ] || {{ echo "not so: $1" >&2; exit 1; }}\n',
        )
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return calls

    return make


def starts(run_dir: Path, *ended: tuple[int, str | None], job: str = "7") -> None:
    """Record starts at these steps, and why they ended."""
    for number, (step, reason) in enumerate(ended):
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        job_starts.note_start(run_dir, job, number, "n[1-2]")
        if reason is not None:
            job_starts.note_end(run_dir, job, number, reason)


@pytest.mark.parametrize(
    ("ended", "refused"),
    [
        ([(0, "failed: x"), (0, "failed: x"), (0, "failed: x")], "made no step in 3 starts: it is still at 0"),
        ([(5, None), (5, None), (5, "failed: x")], "lost, or it was killed; failed: x"),
        ([(0, "failed: x"), (0, "failed: x")], None),
        ([(0, "failed: x"), (0, "failed: x"), (3, "failed: x")], None),
        ([(5, "failed: x"), (3, "failed: x"), (3, "failed: x")], None),  # it is not still at 5
        ([(0, "preempted"), (0, "preempted"), (0, "preempted"), (0, "preempted")], None),
        ([(0, None), (0, "preempted"), (0, None), (0, "preempted"), (0, None)], "made no step"),
        ([(0, "taken back by Slurm"), (0, "preempted"), (0, "taken back by Slurm")], None),
        ([(step, "saved after USR2") for step in range(8)], None),
        ([(step, "saved after USR2") for step in range(9)], "was queued again 8 times"),
    ],
)
def test_a_job_that_gets_nowhere_is_not_started_for_ever(
    ended: list[tuple[int, str | None]], refused: str | None, tmp_path: Path
) -> None:
    starts(tmp_path, *ended)
    starts(tmp_path, *[(0, "failed: x")] * 5, job="6")  # another job's are its own
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": ended[-1][0]}) + "\n")
    problem = requeue.refusal(tmp_path, "7", max_requeues=8)
    assert (problem is None) == (refused is None), problem
    if problem is not None and refused is not None:
        assert refused in problem.cause and problem.fix


@pytest.mark.parametrize(
    ("came", "failures", "preempt", "why"),
    [
        ([signal.SIGUSR2], [SAVED], "None", "saved after USR2"),
        ([signal.SIGUSR2], [UNSAVED], "None", "the last save failed, continues from step 5"),
        ([signal.SIGTERM], [UNSAVED], "2026-01-01T00:00:00", "the last save failed, continues from step 5"),
        ([signal.SIGTERM], [UNSAVED], "None", None),
        ([signal.SIGTERM], [SAVED], "None", None),  # a user's scancel
        ([signal.SIGTERM], [SAVED], "2026-01-01T00:00:00", "preempted"),
        ([], [CRASH], "2026-01-01T00:00:00", "preempted"),
        ([], [CRASH], "None", None),
        ([], [USER], "2026-01-01T00:00:00", None),
        ([], [], "2026-01-01T00:00:00", "preempted"),
        ([], [ECC, CRASH], "None", "node at fault: n4"),
        ([], [CRASH, ECC], "None", None),  # the first one is the cause
        ([signal.SIGUSR2], [USER], "None", None),
    ],
)
def test_what_goes_back_to_the_queue(
    came: list[signal.Signals], failures: list[Failure], preempt: str, why: str | None, scontrol: Callable[..., Path]
) -> None:
    scontrol(preempt=preempt)
    assert requeue.reason(requeue.ending("7", 0), came, failures, SAVED in failures, saved=5) == why
    if came == [signal.SIGUSR2]:  # without a checkpoint of this start the next one would stand where this one began
        assert requeue.reason(None, came, failures, SAVED in failures, saved=None) is None


def test_a_checkpoint_of_this_start_is_told_from_an_earlier_one(tmp_path: Path) -> None:
    assert job_starts.newest_checkpoint(tmp_path) is None
    manifest = tmp_path / "checkpoints/step_00000005/manifest.json"
    for name in ("step_00000009.tmp", "step_00000009.corrupt", "step_00000005"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    before = job_starts.newest_checkpoint(tmp_path)
    assert before is not None and before[0] == 5
    os.utime(manifest, (1, 1))
    assert job_starts.newest_checkpoint(tmp_path) != before, "the same step, saved anew"


def test_what_slurm_has_queued_again_by_itself_is_its_doing(scontrol: Callable[..., Path]) -> None:
    """Without a GraceTime there is no PreemptTime: the job is back in the queue when the signals come."""
    calls = scontrol(restarts=3)
    end = requeue.ending("7", restart=2)
    assert requeue.reason(end, [signal.SIGTERM], [], stopped=False, saved=None) == "taken back by Slurm"
    assert requeue.reason(end, [], [USER], stopped=False, saved=None) is None
    assert requeue.ending("7", restart=3) is None
    assert requeue.queue_again("7", restart=2) == "Slurm has queued it again"
    assert not calls.exists(), "a second requeue would be refused"


PEER = Failure(rank=0, exit_code=1, message="RuntimeError: Connection reset by peer", node="n1")
ENDED = "srun: error: n1: {}: Exited with exit code 1\n"
NO_STEP = "srun: error: Aborting, io error and missing step on node 1\nsrun: error: n1: task 0: Killed\n"


@pytest.mark.parametrize(
    ("srun_log", "was_bounded", "failures", "reason"),
    [
        (NO_STEP, False, [PEER], "processes on n2 died without a word (rank 2, 3)"),
        (ENDED.format("task 0"), True, [PEER], "processes on n2 died without a word (rank 2, 3)"),
        (ENDED.format("task 0"), False, [PEER], None),
        (ENDED.format("tasks 0-1"), True, [PEER], None),
        (NO_STEP, False, [CRASH, PEER], None),
    ],
)
def test_processes_that_died_without_a_word_are_named(
    srun_log: str, was_bounded: bool, failures: list[Failure], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = subprocess.CompletedProcess([], 0, "n1\nn2\n", "")
    monkeypatch.setattr(requeue.commands, "ask", lambda *_, **__: answer)
    assert requeue.lost_processes(srun_log, was_bounded, failures, "n[1-2]", 2, 2, 1) == reason
    assert requeue.reason(None, [], failures, False, None, reason) == reason


@pytest.mark.parametrize("ended", ["", ENDED.format("task 0")])
def test_srun_waits_no_longer_than_slurm_may_take_to_end_tasks(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times, logs = iter((1000.0, 1001.0, 1069.0, 1071.5)), iter([ended] * 3)  # read every two seconds at most
    monkeypatch.setattr(requeue, "time", SimpleNamespace(monotonic=lambda: next(times)))  # no other thread's
    monkeypatch.setattr(requeue, "kill_wait_s", lambda: 40)
    bound = requeue.Bound(lambda: next(logs))
    assert [bound.is_passed() for _ in range(4)] == [False, False, False, bool(ended)]


def test_a_job_that_slurm_says_nothing_of_was_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue.commands, "ask", lambda *asked, **_: subprocess.CompletedProcess(asked, 1, "", ""))
    assert requeue.ending("7", restart=2) is None


@pytest.mark.parametrize(
    ("job", "announced", "ending"),
    [
        ({}, None, None),
        ({"preempt": "2026-01-01T00:00:00"}, None, ("preempted", True, False)),
        ({"state": "COMPLETING"}, "", ("cancelled", False, True)),
        ({"state": "COMPLETING"}, None, ("cancelled", False, True)),  # the output cannot be read
        ({"state": "CANCELLED", "preempt": "2026-01-01T00:00:00"}, "", ("cancelled", False, True)),
        ({"state": "COMPLETING", "reason": "TimeLimit"}, " DUE TO TIME LIMIT", ("its time limit", False, True)),
        ({"state": "COMPLETING"}, " DUE TO PREEMPTION", ("preempted", True, True)),  # PreemptMode=CANCEL
        ({"state": "COMPLETING", "restarts": 1}, " DUE TO JOB REQUEUE", ("taken back by Slurm", True, True)),
        ({"state": "PENDING", "restarts": 1}, None, ("taken back by Slurm", True, True)),
    ],
)
def test_how_slurm_ends_a_start_by_the_state_of_its_job(
    job: dict[str, Any], announced: str | None, ending: tuple[str, bool, bool] | None,
    scontrol: Callable[..., Path], tmp_path: Path,
) -> None:  # fmt: skip
    scontrol(end="2026-11-21T07:53:01", **job)
    if announced is not None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 60))
        (tmp_path / "out").write_text(f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT {when}{announced} ***\n")
    assert requeue.ending("7", 0) == (None if ending is None else requeue.Ending(*ending))
    assert requeue.was_cancelled("7") == (announced == "")
    assert (requeue.outlook("7").ends_at is None) == requeue.outlook("7").is_ending


@pytest.mark.parametrize(
    ("state", "output", "why"),
    [
        ("PREEMPTED", "", "preempted"),
        ("NODE_FAIL", "", "its node was lost"),
        ("CANCELLED by 0", "", "cancelled"),
        ("", "DUE TO PREEMPTION", "preempted"),
        ("", "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "its node was lost"),
        ("", "DUE TO JOB REQUEUE", "taken back by Slurm"),
        ("", "", None),
    ],
)
def test_how_a_start_ended_by_slurms_own_record(
    state: str, output: str, why: str | None, scontrol: Callable[..., Path], tmp_path: Path
) -> None:
    """Accounting, with a line per start; without it what slurmstepd wrote to the job's output since that start."""
    scontrol()
    rows = f"2026-11-22T04:00:00|{state}\n2026-11-22T03:00:00|TIMEOUT" if state else ""
    write_program(tmp_path / "bin/sacct", f"#!/bin/bash\necho '{rows}'\n")
    said = f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T04:09:52 {output} ***\n" if output else ""
    (tmp_path / "out").write_text("*** JOB 7 ON n1 CANCELLED AT 2026-11-22T03:59:00 DUE TO PREEMPTION ***\n" + said)
    assert requeue.end_by_slurm("7", 1, "2026-11-22T04:00:00") == why


@pytest.mark.parametrize(
    ("before", "nodes", "fails", "calls", "said"),
    [
        ("(null)", [], "never", ["requeue 7"], "queued again"),
        ("(null)", ["n4"], "never", ["requeue 7", "update JobId=7 ExcNodeList=n4"], "queued again without n4"),
        ("n[1-2]", ["n4"], "never", ["requeue 7", "update JobId=7 ExcNodeList=n[1-2],n4"], "without n[1-2],n4"),
        ("(null)", ["n4"], "update", ["requeue 7", "update JobId=7 ExcNodeList=n4"], "not let it exclude n4: not so"),
    ],
)
def test_queued_again_without_a_bad_node(
    before: str, nodes: list[str], fails: str, calls: list[str], said: str, scontrol: Callable[..., Path]
) -> None:
    noted = scontrol(excluded=before, fails=fails)
    assert said in requeue.queue_again("7", nodes)
    assert noted.read_text().splitlines() == calls


def test_a_refused_requeue_says_why(scontrol: Callable[..., Path]) -> None:
    scontrol(fails="requeue")
    with pytest.raises(LaunchError, match="scontrol requeue 7 refused: not so: requeue") as caught:
        requeue.queue_again("7")
    assert "run.resume=true" in caught.value.fix


def test_the_summary_counts_starts_by_why_they_ended(tmp_path: Path) -> None:
    assert job_starts.summary(tmp_path) is None
    starts(tmp_path, (0, "done"))
    assert job_starts.summary(tmp_path) is None
    starts(tmp_path, (5, "saved after USR2"), (9, None), (9, "saved after USR2"), (12, None), job="8")
    told = job_starts.summary(tmp_path)
    assert told is not None and told.startswith("started 5 times; ended before: ")
    assert "2 x saved after USR2" in told and "1 x done" in told and "1 x without a word" in told


def measured(run_dir: Path, saves: list[float], steps: list[float]) -> None:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": 1, "total_s": s}) for s in saves]
    (run_dir / "logs/checkpoints.jsonl").write_text("\n".join([*lines, '{"step": 3, "tot']))
    (run_dir / "metrics.jsonl").write_text("\n".join(json.dumps({"step": 1, "step_time_s": s}) for s in steps))


def test_the_lead_follows_the_measured_saves_and_steps(tmp_path: Path) -> None:
    assert preemption_warning.needed_s(tmp_path) is None
    measured(tmp_path, [3.0, 100.0, 5.0], [])
    assert preemption_warning.needed_s(tmp_path) == 30 + 200
    measured(tmp_path, [3.0, 100.0, 5.0], [900.0] + [20.0] * 99)  # the first step compiled
    assert preemption_warning.needed_s(tmp_path) == 30 + 240
    assert preemption_warning.signal_s(None, tmp_path, None) == 270
    assert preemption_warning.signal_s(45, tmp_path, None) == 45
    checkpoint = str(tmp_path / "checkpoints/step_00000005")
    assert preemption_warning.signal_s(None, tmp_path / "new", checkpoint) == 270
    assert preemption_warning.signal_s(None, tmp_path / "new", None) == 120


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120), ("90:30", 5430), ("4:00:00", 14400), ("2-0", 172800), ("1-2:30", 95400), ("1-02:03:04", 93784),
        ("UNLIMITED", None), ("", None), ("soon", None), ("0", None), ("0:00:00", None),
    ],
)  # fmt: skip
def test_time_limits_as_slurm_writes_them(text: str, seconds: int | None) -> None:
    assert preemption_warning.limit_s(text) == seconds


def test_a_time_limit_that_leaves_no_time_is_doubted_with_its_numbers(tmp_path: Path) -> None:
    doubts = preemption_warning.doubts
    first, second = doubts(120, 120, tmp_path, periodic=False)
    assert "leaves 120 s, and the job is told to save 120 s before it: 0 s to start and to train" in first
    assert "longer than the 120 s before the time limit" in second and "set checkpoint.every_minutes" in second
    assert doubts(3600, 120, tmp_path, periodic=True) == []
    first, second = doubts(55, None, tmp_path, periodic=False)  # sbatch --signal of the user's own
    assert "leaves 55 s to start, to train and to save" in first and "120" not in first
    assert "longer than what --signal leaves before the time limit" in second
    assert doubts(61, None, tmp_path, periodic=True) == []
    measured(tmp_path, [1750.0], [])
    assert doubts(3600, 120, tmp_path, periodic=False) == []
    measured(tmp_path, [1770.0], [])
    (only,) = doubts(3600, 120, tmp_path, periodic=False)
    assert "leaves 3600 s, and the job is told to save 3570 s before it: 30 s to start and to train" in only


class Clock:
    """Runs a `PreemptionWarning` at chosen times, with what Slurm says about the job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, outlook: requeue.Outlook) -> None:
        self.sent: list[tuple[float, str]] = []
        self.now, self.run_dir, self.outlook = 0.0, run_dir, outlook
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(requeue, "outlook", lambda job: self.outlook)
        monkeypatch.setattr(preemption_warning, "signal_steps", lambda name, job: self.sent.append((self.now, name)))
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process's own stay as they are
        self.warning = preemption_warning.PreemptionWarning()

    def run(self, until: float) -> None:
        while self.now < until:
            self.now += 1
            self.warning.watch("7", self.run_dir)


def test_the_ranks_are_told_in_time_for_a_slow_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measured(tmp_path, [400.0], [10.0])  # 30 + 2 × 410
    clock = Clock(monkeypatch, tmp_path, requeue.Outlook(ends_at=3600))
    clock.run(3600 - 850 - 1)
    assert clock.sent == [] and "told to save 850 s before its time limit" in capfd.readouterr().err
    clock.run(3600 - 850)
    assert clock.sent == [(2750.0, "USR2")]
    assert clock.warning.came == [signal.SIGUSR2]


def test_the_ranks_are_told_again_until_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, tmp_path, requeue.Outlook())
    clock.run(10)
    assert clock.sent == []
    clock.warning.came.append(signal.SIGUSR2)
    clock.warning.came.append(signal.SIGTERM)
    clock.run(18)
    assert clock.warning.told_at == 11.0
    assert clock.sent == [(11.0, "USR2"), (11.0, "TERM"), (14.0, "USR2"), (17.0, "USR2")]


def test_the_end_time_of_a_cancelled_job_is_no_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sets it to the moment of the cancel, and sends SIGTERM to the steps itself."""
    measured(tmp_path, [400.0], [10.0])
    clock = Clock(monkeypatch, tmp_path, requeue.Outlook(ends_at=100_000))
    monkeypatch.setattr(requeue, "_announced_endings", lambda *_: [])
    clock.run(40)
    clock.outlook = requeue.Outlook(ends_at=40, state="COMPLETING")
    clock.run(100)
    clock.warning.came.append(signal.SIGTERM)
    clock.run(110)
    assert clock.sent == [] and clock.warning.ending == requeue.Ending("cancelled")


def test_a_preemption_without_a_signal_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, tmp_path, requeue.Outlook())
    clock.run(20)
    clock.outlook = requeue.Outlook(preempted=True)
    clock.run(60)
    assert clock.sent[0] == (31.0, "USR2")


def test_times_and_nodes_as_scontrol_writes_them(scontrol: Callable[..., Path]) -> None:
    scontrol(end="2026-11-21T07:53:01", preempt="2026-11-21T07:48:19", excluded="n[1-2]")
    local = time.mktime((2026, 11, 21, 7, 53, 1, 0, 0, -1))
    assert requeue.outlook("7") == requeue.Outlook(ends_at=local, preempted=True, excluded="n[1-2]")


CHILD = """
import os, signal, subprocess, sys
from shardkit.launch.local.processes import note_early
from shardkit.run.requests import StopRequest
note_early()
os.kill(os.getpid(), signal.SIGUSR2)  # while it starts
alive = subprocess.run(["bash", "-c", "kill -USR2 $$; echo alive"], capture_output=True, text=True).stdout
request = StopRequest()
request.listen()
print(alive.strip(), request.flags())
request.close()
os.kill(os.getpid(), signal.SIGUSR2)  # while it ends
"""


def test_a_signal_while_ranks_start_is_kept_and_ends_no_child() -> None:
    process = subprocess.run([sys.executable, "-c", CHILD], cwd=REPO, env=environment(), capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "alive [0.0, 1.0, 0.0]\n"), process
