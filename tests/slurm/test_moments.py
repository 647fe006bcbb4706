"""Faults at chosen moments, on the test cluster, and the outcomes that are allowed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardkit.launch.failures import job_starts
from tests.launch.jobs import losses
from tests.slurm.cluster import KILL_WAIT_S, SCRIPT, Cluster, last_step, read, reasons, record, until, with_task
from tests.slurm.tasks import phase_of

STEPS = 400
"""Optimizer steps of a run that nothing disturbs."""
_LOOK_S = 30.0  # between two looks of the batch script at the controller


@dataclass(frozen=True)
class Draw:
    """One fault.

    Attributes:
        template: `torchrun` and `srun` are the templates in slurm/, `script` is a program of the user's own.
        fault: what `play` plays: cancel, limit, stop, processes or preempt.
        moment: the phase that the fault is aimed at.
        at: how far into that phase, from 0 to 1.
        save_s: seconds that a save takes.
        kill_wait_s: seconds between Slurm's SIGTERM and its SIGKILL.
    """

    template: str
    strategy: str
    fault: str
    moment: str
    at: float
    save_s: float
    kill_wait_s: int

    @property
    def name(self) -> str:
        return f"{self.fault} at {self.moment}, {self.template}"


class Played:
    """One draw's job on the cluster."""

    def __init__(self, drawn: Draw, cluster: Cluster, folder: Path) -> None:
        self.draw, self.cluster = drawn, cluster
        self.folder = folder
        self.run_dir, self.output = folder / "run", folder / "out"
        self.job = ""

    def queue(self, *options: str, **extra: Any) -> None:
        """Submit the draw's job, on 2 nodes × 1 rank."""
        if self.draw.template == "script":
            words = ["--run-dir", str(self.run_dir), "--checkpoints", str(self.run_dir / "mine/checkpoints")]
            words += ["--nodes=2", "--gpus-per-node=0", "--ranks-per-node=1", "--cpus-per-task=2"]
            script = ["tests/launch/plain.py", str(self.run_dir / "mine"), "--listen=term", "--wait=0.05"]
            script += [f"--steps={STEPS}", f"--save-s={self.draw.save_s}"]
            self.job, _ = self.cluster.submit(*words, "--", *script)
            self.output = self.run_dir / f"logs/slurm-{self.job}.out"
            return
        args = settings(self.run_dir, self.draw.strategy, **{"task__args__save_s": self.draw.save_s, **extra})
        self.job = self.cluster.sbatch(self.draw.template, self.output, args, *options, ranks=1)

    def say(self) -> str:
        return f"{self.draw}\n{self.cluster.run('scontrol', 'show', 'job', self.job).stdout}\n{read(self.output)}"

    def until(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        until(condition, seconds, self.say)

    def wait_for_phase(self, *phases: str) -> None:
        self.until(lambda: self.phase() in phases)

    def phase(self) -> str:
        if self.draw.template == "script":
            path = self.run_dir / "mine/phase"
            return path.read_text() if path.exists() else ""
        return phase_of(self.run_dir)[0]

    def warn(self) -> None:
        """What `--signal` and a preemption send."""
        self.cluster.call("scancel", "--batch", "--signal=USR2", self.job)

    def ended(self, seconds: float = 240) -> str:
        """The state that the job ended in."""
        deadline, state = time.monotonic() + seconds, ""
        while state not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
            assert time.monotonic() < deadline, self.say()
            time.sleep(0.5)
            state = self.cluster.field(self.job, "JobState")
        return state

    def saved_step(self) -> int | None:
        newest = job_starts.newest_checkpoint(self.run_dir)
        return None if newest is None else newest[0]


def settings(run_dir: Path, strategy: str, **extra: Any) -> list[str]:
    values = {
        "train__max_steps": STEPS, "train__deterministic": "true", "parallel__strategy": strategy,
        "memory__plan": "false", **extra,
    }  # fmt: skip
    return with_task(run_dir, "SlowSaves", **values)


def undisturbed(cluster: Cluster, folder: Path, strategy: str) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""
    args = settings(folder / "run", strategy, task__args__save_s=0, task__args__pace=0)
    job = cluster.sbatch("srun", folder / "out", args, ranks=1)
    assert cluster.wait(job, folder / "out") == "COMPLETED", read(folder / "out")
    return losses(folder / "run")


def play(drawn: Draw, cluster: Cluster, folder: Path, whole: Callable[[str], dict[int, float]]) -> str:
    """Play a draw; returns its outcome in words.

    Args:
        whole: strategy → the losses of an undisturbed run.

    Raises:
        AssertionError: the outcome is not allowed; the message holds the draw and the job's output.
    """
    played = Played(drawn, cluster, folder)
    try:
        faults = {"cancel": cancel, "limit": limit, "stop": stop, "processes": processes, "preempt": preempt}
        outcome = faults[drawn.fault](played)
        if drawn.template != "script" and (played.run_dir / "metrics.jsonl").exists():
            expected, trained = whole(drawn.strategy), losses(played.run_dir)
            assert trained == {step: expected[step] for step in trained}, f"other losses: {played.say()}"
            assert sorted(trained) == list(range(1, len(trained) + 1)), f"a step is missing: {played.say()}"
        return outcome
    finally:
        if played.job:
            cluster.run("scancel", played.job)


def cancel(played: Played) -> str:
    """The user cancels: the job is saved if Slurm leaves the time, ends, says why, and is never queued again."""
    drawn = played.draw
    periodic = {"checkpoint__every_steps": 15} if drawn.moment in ("publishing", "published", "writing", "look") else {}
    played.queue(**periodic)
    if drawn.moment == "start-up":
        played.until(lambda: ", start 1," in read(played.output))
        time.sleep(4 * drawn.at)
    else:
        played.wait_for_phase("training")
        _reach(played)
    stepped = drawn.moment != "start-up" or bool(played.phase())
    played.cluster.call("scancel", played.job)
    assert played.ended() == "CANCELLED", played.say()
    assert played.cluster.field(played.job, "Restarts") == "0", played.say()
    said = read(played.output)
    assert "queued again" not in said.replace("not queued again", "").replace("not be queued again", ""), played.say()
    assert set(reasons(played.run_dir)) == {"cancelled"}, played.say()
    if "cancelled, not queued again" not in said:  # Slurm's SIGKILL came first
        assert stepped and played.cluster.field(played.job, "ExitCode") == "0:9", f"not killed: {played.say()}"
        return "cancelled, killed before its save was complete"
    if drawn.template == "script":
        assert (played.run_dir / "mine/checkpoints/last.pt").exists(), played.say()
    elif stepped and drawn.moment != "start-up":
        step = last_step(played.run_dir)
        assert played.saved_step() == step and f"saved last: step {step}" in said, played.say()
    return "cancelled, saved and said so" if stepped else "cancelled before its first step, and said so"


def _reach(played: Played) -> None:
    """Wait for the draw's moment."""
    drawn = played.draw
    if drawn.moment == "warned":
        time.sleep(drawn.at)
        played.warn()
        played.wait_for_phase("writing")
        time.sleep(drawn.at * 0.8 * drawn.save_s)
    elif drawn.moment == "look":  # so that the look falls into the save that the cancel causes
        played.until(lambda: (played.run_dir / "checkpoints/latest").exists())
        began = re.search(r"\[(\d\d:\d\d:\d\d)\] job \d+, start 1,", read(played.output))
        assert began is not None, played.say()
        clock = time.strftime("%Y-%m-%d ") + began[1]
        since = time.time() - time.mktime(time.strptime(clock, "%Y-%m-%d %H:%M:%S"))
        time.sleep(max(0.0, (_LOOK_S - since) % _LOOK_S - drawn.at * drawn.save_s))
    elif drawn.moment == "training":
        time.sleep(drawn.at)
    elif drawn.template == "script":
        played.warn()
        played.wait_for_phase("writing")
        time.sleep(drawn.at * drawn.save_s)
    else:
        played.wait_for_phase(drawn.moment)
        time.sleep(drawn.at * {"writing": 0.8, "publishing": 0.2}.get(drawn.moment, 0.0) * drawn.save_s)


def limit(played: Played) -> str:
    """The time limit comes in the middle of a save, which has KillWait to end in."""
    drawn = played.draw
    played.queue(task__args__save_s=25 + 20 * drawn.at)
    played.wait_for_phase("training")
    ranks = [phase_of(played.run_dir, rank)[1] for rank in (0, 1)]
    played.warn()
    played.wait_for_phase("writing")
    played.cluster.call("scontrol", "update", f"jobid={played.job}", "EndTime=now+5")  # no time that is past
    played.until(lambda: "its time limit" in read(played.output), 60)  # Slurm looks every 30 s
    reached = time.monotonic()  # when it is seen here; ranks that end with torchrun's agent do so within 1.6 s
    played.until(lambda: not all(os.path.exists(f"/proc/{pid}") for pid in ranks))
    lived_s = time.monotonic() - reached
    played.until(lambda: played.cluster.field(played.job, "JobState") != "COMPLETING", 90)
    if played.saved_step() is not None:
        assert reasons(played.run_dir)[-1] == "saved after USR2", played.say()
        return "saved within KillWait, queued again"
    assert lived_s > drawn.kill_wait_s / 2, f"the ranks lived {lived_s:.1f} s: {played.say()}"
    assert played.ended() == "TIMEOUT", played.say()
    words = rf"its time limit: the ranks were told to save \d+ s before it and have {drawn.kill_wait_s} s after it"
    assert re.match(rf"{words} .*; nothing is saved$", reasons(played.run_dir)[-1]), played.say()
    return "the time limit, said what it had"


def stop(played: Played) -> str:
    """A rank stops in the middle of a save: it is named, with its host, its file and the key of the limit."""
    drawn = played.draw
    stuck = int(drawn.at > 0.5)
    played.run_dir.mkdir(parents=True)
    (played.run_dir / ".stuck").touch()
    played.queue(checkpoint__every_steps=15, checkpoint__timeout_s=5 + drawn.save_s, task__args__stuck_rank=stuck)
    assert played.ended() == "FAILED", played.say()
    said = read(played.output)
    limit_s = 5 + drawn.save_s
    named = rf"no progress for {limit_s:.0f} s at step 15 \(save\); rank\(s\) {stuck} on n[12] \(in or after "
    assert re.search(rf"{named}step_00000015\.tmp/rank_0000{stuck}\.bin", said), played.say()
    assert "raise checkpoint.timeout_s" in said, played.say()
    assert played.cluster.field(played.job, "Restarts") == "0", played.say()
    return "ended, named the rank, its host and its file"


def processes(played: Played) -> str:
    """A step's processes on the second node die, its slurmd lives on: the job is queued again, and loses nothing."""
    drawn, cluster, go_file = played.draw, played.cluster, played.folder / "go"
    played.queue(
        checkpoint__every_steps=30, task__args__save_s=0.2 * drawn.save_s, task__args__pace=0.02,
        task__args__go_file=go_file,
    )  # fmt: skip
    played.until(lambda: (played.run_dir / "checkpoints/latest").exists())
    time.sleep(drawn.at)
    cluster.call("bash", str(SCRIPT), "kill-steps", str(cluster.folder), "n2", played.job)
    go_file.touch()
    assert played.ended(480) == "COMPLETED", played.say()
    assert cluster.field(played.job, "Restarts") == "1", played.say()
    assert reasons(played.run_dir) == ["processes on n2 died without a word (rank 1)", "done"], played.say()
    assert last_step(played.run_dir) == STEPS, played.say()
    return "queued again, each step once"


def preempt(played: Played) -> str:
    """A job of a higher partition takes the nodes: the run is queued again, and loses no step."""
    played.queue(checkpoint__every_steps=60)
    if played.draw.moment == "start-up":
        played.until(lambda: ", start 1," in read(played.output))
        time.sleep(4 * played.draw.at)
    else:
        played.wait_for_phase("training")
        _reach(played)
    played.cluster.preempt()
    assert played.ended(480) == "COMPLETED", played.say()
    assert played.cluster.field(played.job, "Restarts") == "1", played.say()
    events = [(event["event"], event["restart"]) for event in record(played.run_dir)]
    assert events[-2:] == [("start", 1), ("end", 1)] and reasons(played.run_dir)[-1] == "done", played.say()
    assert last_step(played.run_dir) == STEPS, played.say()
    assert "started 2 times; ended before: 1 x " in read(played.output), played.say()
    return "queued again, each step once"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """Strategy → the losses of an undisturbed run."""
    return {strategy: undisturbed(cluster, tmp_path_factory.mktemp(strategy), strategy) for strategy in ("ddp", "fsdp")}


SAVED = "cancelled, saved and said so"
DRAWS = [
    # Cancelled after a warning of Slurm, it was queued again 4 of 4 times; and where a look fell into the last save.
    (Draw("torchrun", "ddp", "cancel", "warned", 0.3, 3.0, 30), SAVED),
    (Draw("srun", "fsdp", "cancel", "warned", 0.7, 3.0, 30), SAVED),
    (Draw("torchrun", "ddp", "cancel", "look", 0.5, 3.0, 30), SAVED),
    (Draw("srun", "ddp", "cancel", "publishing", 0.5, 3.0, 30), SAVED),
    (Draw("script", "ddp", "cancel", "warned", 0.5, 3.0, 30), SAVED),
    # torchrun's agent ends at its third SIGTERM; its ranks were ended with it, 0.4 to 1.6 s after the limit.
    (
        Draw("torchrun", "ddp", "limit", "writing", 1.0, 0.0, 10),
        "the time limit, said what it had|saved within KillWait, queued again",
    ),
    # Under torchrun srun waited without end; under srun the job failed although checkpoints were there.
    (Draw("torchrun", "ddp", "processes", "training", 0.5, 1.0, 10), "queued again, each step once"),
    (Draw("srun", "ddp", "processes", "training", 0.5, 1.0, 10), "queued again, each step once"),
    # A signal is dropped before the batch script runs, and blocked in every thread of a rank afterwards.
    (Draw("srun", "ddp", "preempt", "writing", 0.5, 3.0, 30), "queued again, each step once"),
    (Draw("srun", "fsdp", "stop", "writing", 0.8, 1.0, 10), "ended, named the rank, .*"),
]
LATER = [
    (Draw("srun", "fsdp", "cancel", "start-up", 0.6, 1.0, 30), "cancelled.*"),
    (Draw("torchrun", "ddp", "cancel", "published", 0.5, 3.0, 30), SAVED),
    (Draw("torchrun", "fsdp", "preempt", "start-up", 0.4, 1.0, 30), "queued again, each step once"),
]


@pytest.mark.parametrize(
    ("drawn", "outcome"),
    [*DRAWS, *(pytest.param(*later, marks=pytest.mark.release) for later in LATER)],
    ids=[drawn.name for drawn, _ in DRAWS + LATER],
)
def test_a_fault_at_its_moment_ends_as_it_may(
    drawn: Draw, outcome: str, cluster: Cluster, whole: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    cluster.set_kill_wait(drawn.kill_wait_s)
    try:
        played = play(drawn, cluster, tmp_path, whole.__getitem__)
    finally:
        cluster.set_kill_wait(KILL_WAIT_S)
    assert re.fullmatch(outcome, played), played
