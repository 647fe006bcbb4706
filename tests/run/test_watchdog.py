from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from shardkit.launch.failures import job_starts
from shardkit.parallel.context import ATTRIBUTE
from shardkit.run import watchdog
from shardkit.run.watchdog import Part, Watchdog, behind, dump_collectives
from shardkit.tasks.causal_lm import CausalLM
from shardkit.tasks.hf_text import HFCausalLM
from tests.commands import python_m
from tests.launch.jobs import REPO, command, environment, losses, run, settings, started, until_line, with_marker
from tests.launch.tasks import Troubled


def state(rank: int, beats: int, waits: bool) -> dict[str, Any]:
    return {"rank": rank, "step": 7, "doing": "forward", "beats": beats, "at": "task.py:3 in loss", "waits": waits}


WAITS = [state(rank, 9, True) for rank in range(3)]
WRITES = {"phase": "writing step_00000010.tmp/rank_00001.bin", "host": "n2"}


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([WAITS[0], state(1, 8, True), WAITS[2]], "did not arrive: rank 1 (step 7"),
        ([*WAITS[:2], state(2, 9, False)], "did not arrive: rank 2 (step 7"),
        (WAITS[:2], "all 2 ranks are at the same place"),
        ([WAITS[0], None], "rank(s) 1 did not even answer"),
        (
            [WAITS[0] | {"phase": "waiting for the other ranks' files", "host": "n1"}, WAITS[1] | WRITES],
            "did not arrive: rank 1 on n2 (step 7, forward, writing step_00000010.tmp/rank_00001.bin, task.py:3",
        ),
        (
            [waits | {"block": f"layers.{waits['rank'] % 2}"} for waits in WAITS],
            "last blocks: layers.0 on rank 0, 2, layers.1 on rank 1",
        ),
        (  # rank 1 left out an exchange, and waits for the next reduction
            [
                state(0, 8, True) | {"groups": [["cp", [0, 1], 12], ["the whole job", [0, 1], 2]]},
                state(1, 9, True) | {"groups": [["cp", [0, 1], 11], ["the whole job", [0, 1], 3]]},
            ],
            "rank 1 (step 7, forward, task.py:3 in loss); in the group cp (ranks 0, 1) 12 collectives have begun, 11 "
            "on rank 1",
        ),
        (
            [state(0, 10, True), state(1, 8, True), state(2, 8, False)],  # rank 1 waits for rank 2 in a layer
            "did not arrive: rank 2 (step 7, forward, task.py:3 in loss)",
        ),
        (
            [state(rank, 9 - rank, rank == 0) | {"groups": [["cp", [0, 1], 12 - rank]]} for rank in range(2)],
            "did not arrive: rank 1 (step 7, forward, task.py:3 in loss); in the group cp (ranks 0, 1) 12 collectives",
        ),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(states: list[dict[str, Any] | None], said: str) -> None:
    assert said in behind(states)


@pytest.mark.slow
def test_a_rank_that_stops_in_a_save_is_named_within_the_limit_of_saves(tmp_path: Path) -> None:
    """The limit of a step is far; the one of saves, its key, the rank, its host and its file are in the message."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.stuck").touch()
    argv = settings(
        tmp_path / "run", task__factory="tests.slurm.tasks:SlowSaves", task__args__save_s=1, task__args__stuck_rank=1,
        checkpoint__every_steps=3, checkpoint__timeout_s=4, run__init_timeout_s=300,
    )  # fmt: skip
    argv = [item for item in argv if not item.startswith("task.args.how=")]
    began = time.monotonic()
    done = run(command("--nproc-per-node", "2", *argv))
    assert done.returncode == 1 and time.monotonic() - began < 200, done.stderr
    assert f"no progress for 4 s at step 3 (save); rank(s) 1 on {os.uname().nodename} (in or after " in done.stderr
    assert "step_00000003.tmp/rank_00001.bin" in done.stderr and "raise checkpoint.timeout_s if a save" in done.stderr
    assert "if a save makes no progress for 4 s, the job ends (checkpoint.timeout_s)" in done.stdout


def bites(dog: Watchdog, seconds: float, live: Callable[[float], None], patch: pytest.MonkeyPatch) -> list[float]:
    """The moments of `seconds` at which a watchdog would end its process, which does `live(now)` in each of its ticks.

    No other time passes: a busy machine may stop the thread that beats for longer than a limit, and not the watchdog's.
    """
    now, ended = 0.0, list[float]()

    def wait(tick: float) -> bool:
        nonlocal now
        now += tick
        live(now)
        return now > seconds

    patch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    patch.setattr(dog, "_ended", SimpleNamespace(wait=wait))
    patch.setattr(dog, "_bite", lambda part: ended.append(now))
    dog._watch()
    return ended


def test_who_beats_in_time_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dog = Watchdog(tmp_path / "hang", 0, 1, limit_s=1.0)
    assert bites(dog, 5, lambda now: dog.beat(1, "forward"), monkeypatch) == []
    with dog.allowing(60):
        assert bites(dog, 50, lambda now: None, monkeypatch) == []
    assert 1.0 < bites(dog, 5, lambda now: None, monkeypatch)[0] < 1.3


def test_a_hang_on_gpus_leaves_the_last_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/nccl_rank_")
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace())
    assert dump_collectives(3) is None, "a build without NCCL"
    recorder = SimpleNamespace(_dump_nccl_trace=lambda: b"pickled")
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    assert dump_collectives(3) == tmp_path / "nccl_rank_3"
    assert (tmp_path / "nccl_rank_3").read_bytes() == b"pickled"


def test_what_an_earlier_attempt_left_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    (tmp_path / "rank_1.txt").write_text(json.dumps(state(1, 3, False)) + "\n")
    dog = Watchdog(tmp_path, 1, 2, limit_s=60)
    dog.start()
    dog.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["rank_1.earlier.txt"]


STUCK = """
import contextlib, pathlib, sys, threading
from shardkit.run.watchdog import Part, Watchdog
limit_s, doing, part = {case}
dog = Watchdog(pathlib.Path(sys.argv[1]), 0, 1, limit_s, settle_s=0.1)
dog.start()
dog.beat(3, doing)
def stuck():
    with dog.within(part) if part else contextlib.nullcontext():
        threading.Event().wait()
stuck()
"""
STEP = '0.5, "forward", None'
SAVE = '60, "save", Part(1.0, "checkpoint.timeout_s", signs=lambda: 4096)'


@pytest.mark.parametrize(("case", "said"), [(STEP, "at step 3 (forward)"), (SAVE, "raise checkpoint.timeout_s")])
def test_who_does_not_is_ended_with_its_stacks(case: str, said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK.format(case=case), str(tmp_path)], cwd=REPO, env=environment(),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "no progress for" in done.stderr and said in done.stderr, done.stderr
    text = (tmp_path / "rank_0.txt").read_text()
    assert "in stuck" in text
    assert json.loads(text.splitlines()[0])["step"] == 3


def test_a_save_that_writes_nothing_is_ended_after_its_limit_and_not_after_twice_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = Watchdog(tmp_path, 0, 1, 60)
    with dog.within(Part(2.0, "checkpoint.timeout_s", signs=lambda: 4096)):
        begins = bites(dog, 6, lambda now: dog.beat(3, "save") if now < 0.5 else None, monkeypatch)[0]
    assert 2.4 <= begins < 3


SUSPENDED = """
import os, pathlib, signal, sys, time
from shardkit.run.watchdog import Part, Watchdog
dog = Watchdog(pathlib.Path(sys.argv[1]), 0, 1, 1.0, settle_s=0.0)
dog.start()
os.kill(os.getpid(), signal.SIGSTOP)
with dog.within(Part(1.1, signs=time.monotonic)):  # a save that grows
    time.sleep(2.5)
print("alive")
dog.beat(4, "forward")
time.sleep(60)
"""


@pytest.mark.slow
def test_time_in_which_a_job_is_suspended_does_not_count_nor_that_of_a_save_that_grows(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUSPENDED, str(tmp_path)], cwd=REPO, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        time.sleep(2.2)  # what is tested
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "alive\n"), err
    assert "no progress for 1 s at step 4 (forward)" in err


@pytest.mark.slow
def test_a_job_that_was_suspended_for_longer_than_a_step_may_take_goes_on(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 nearly all the time: a collective's own clock goes on while both are suspended."""
    argv = settings(
        tmp_path / "run", task__factory="tests.run.test_watchdog:Lagging", train__max_steps=20, logging__every=1,
        run__step_timeout_s=8,
    )  # fmt: skip
    process = started(command("--nproc-per-node", "2", *argv), TEST_MARKER=str(tmp_path))
    until_line(process, "step 2/")
    everyone = with_marker(f"TEST_MARKER={tmp_path}")
    assert len(everyone) >= 4, "the launcher, torchrun and two ranks"
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everyone:
            os.kill(pid, number)
        time.sleep(12 if number == signal.SIGSTOP else 0)  # what is tested
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert sorted(losses(tmp_path / "run")) == list(range(1, 21))


class Lagging(Troubled):
    """Rank 1 takes half a second for a loss."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5 if self.here else 0)
        return super().loss(model, batch)


def test_each_batch_of_an_evaluation_is_a_sign_of_life(tmp_path: Path) -> None:
    """An evaluation may take longer than a step, and than the ranks' start."""
    argv = settings(
        tmp_path / "run", task__factory="tests.run.test_watchdog:Counted", train__eval_samples=12, train__max_steps=1
    )
    done = python_m("shardkit.train", "--config", REPO / "configs/ddp.yaml", *argv, code=0)
    assert "val_loss" in (tmp_path / "run/metrics.jsonl").read_text()
    counts = [int(count) for count in re.findall(r"^batch after (\d+) beats$", done.stdout, re.MULTILINE)]
    assert len(counts) == 6 == len(set(counts)), counts


class Counted(Troubled):
    """Says before each batch of an evaluation how often the watchdog was told that there is progress."""

    def __init__(self, config: Any, how: str) -> None:
        super().__init__(config, how)
        self.beats, beat = 0, Watchdog.beat

        def counted(dog: Watchdog, step: int, doing: str) -> None:
            self.beats += 1
            beat(dog, step, doing)

        Watchdog.beat = counted

    def dataset(self, split: Literal["train", "val"]) -> list[torch.Tensor] | None:
        return super().dataset("train")

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if not model.training:
            print(f"batch after {self.beats} beats")
        return super().loss(model, batch)


@pytest.mark.slow
def test_a_hanging_rank_is_named_and_the_job_restarts(tmp_path: Path) -> None:
    argv = settings(tmp_path / "run", "hang", run__step_timeout_s=4, checkpoint__every_steps=1)
    done = run(command("--nproc-per-node", "2", "--max-restarts", "1", *argv), timeout=100, code=0)
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    ((step, reason),) = job_starts.restarts(tmp_path / "run")
    assert step == 2 and "no progress for 4 s at step 3" in reason and "did not arrive: rank 1" in reason
    assert "started 2 times; ended before: 1 x rank 0: no progress" in done.stdout
    assert "go_wrong" in (tmp_path / "run/logs/hang/rank_1.earlier.txt").read_text()
    assert os.listdir(tmp_path) == ["run"]


class SkipsExchange(CausalLM):
    """Rank 1 leaves out the last exchange of heads in the forward of step 2."""

    steps = 0

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        self.steps += 1
        if self.steps == 2 and os.environ["RANK"] == "1":
            context: Any = next(module.context_parallel for module in model.modules() if hasattr(module, ATTRIBUTE))
            exchange, calls = context.to_positions, itertools.count(1)

            def skip(heads: torch.Tensor) -> torch.Tensor:
                if next(calls) < self.config.model.n_layers:
                    return exchange(heads)
                return heads[:, context.rank :: context.size].repeat(1, 1, context.size, 1)

            context.to_positions = skip
        return super().loss(model, batch)


@pytest.mark.slow
def test_the_group_is_named_in_which_ranks_wait_for_one_that_left_out_an_exchange(tmp_path: Path) -> None:
    argv = settings(
        tmp_path / "run", task__factory="tests.run.test_watchdog:SkipsExchange", parallel__cp=2, model__preset="debug",
        train__seq_len=64, run__step_timeout_s=4,
    )  # fmt: skip
    argv = [item for item in argv if not item.startswith("task.args.how=")]
    done = run(command("--nproc-per-node", "2", *argv), timeout=100, code=1)
    assert "no progress for 4 s at step 2" in done.stderr, done.stderr
    words = r"in the group cp \(ranks 0, 1\) \d+ collectives have begun, \d+ on rank 1"
    assert re.search(words, done.stderr), done.stderr


class Absent:
    """In step 2 rank 3 does not come to a part of the first layer: it stops before it, or raises."""

    def __init__(self, config: Any, how: str) -> None:
        super().__init__(config)
        self.how = how

    def build_model(self) -> nn.Module:
        model, calls = super().build_model(), itertools.count(1)

        def stay_away(*_: object) -> None:
            if next(calls) == 2 and os.environ["RANK"] == "3":
                if self.how == "raise":
                    raise ValueError("the cat sat on the GPU")
                threading.Event().wait()

        parts = (module for name, module in model.named_modules() if name.endswith(("mlp.proj", "mlp.experts")))
        next(parts).register_forward_pre_hook(stay_away)
        return model


class AbsentInLayer(Absent, CausalLM):
    pass


class AbsentExpert(Absent, HFCausalLM):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "hang",
            [
                r"did not arrive: rank 3 on [^;]*; in the group",
                r"in the group AXIS \(ranks 2, 3\) \d+ collectives have begun, \d+ on rank 3",
            ],
        ),
        ("raise", ["rank 3 failed: ValueError: the cat", r"in the group AXIS \(ranks 2, 3\) rank 2 waited for it"]),
    ],
)
def test_the_axis_is_named_in_whose_group_a_rank_waits(tmp_path: Path, axis: str, how: str, words: list[str]) -> None:
    file, task = {"tp": ("tp.yaml", "AbsentInLayer"), "ep": ("moe.yaml", "AbsentExpert")}[axis]
    argv = settings(
        tmp_path / "run", how, task__factory=f"tests.run.test_watchdog:{task}", train__seq_len=32,
        activation__policy="none", run__step_timeout_s=6 if how == "hang" else 60,
    )  # fmt: skip
    done = run(command("--nproc-per-node", "4", *argv, config=REPO / "configs" / file), timeout=100, code=1)
    assert all(re.search(each.replace("AXIS", axis), done.stderr) for each in words), done.stderr


@pytest.mark.slow
def test_a_rank_that_does_not_even_answer_is_named(tmp_path: Path) -> None:
    argv = settings(tmp_path / "run", "stop", train__max_steps=50, run__step_timeout_s=4)
    done = run(command("--nproc-per-node", "2", *argv), timeout=100, code=1)
    assert "rank(s) 1 on " in done.stderr and " did not even answer" in done.stderr, done.stderr
    assert (tmp_path / "run/logs/hang/rank_0.txt").exists()


def test_a_rank_without_any_weight_joins_in_every_reduction(tmp_path: Path) -> None:
    argv = settings(
        tmp_path / "run", task__factory="tests.launch.tasks:OneWeight", parallel__strategy="zero1",
        precision__mode="fp32", run__step_timeout_s=60,
    )  # fmt: skip
    python_m("shardkit.train", "--config", REPO / "configs/ddp.yaml", *argv, ranks=2, code=0)
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_ranks_that_see_different_data_are_told_so(tmp_path: Path) -> None:
    argv = settings(tmp_path / "run", task__factory="tests.launch.tasks:Uneven", train__eval_samples=4)
    done = python_m("shardkit.train", "--config", REPO / "configs/ddp.yaml", *argv, ranks=2, code=2)
    assert "error: ranks do not have the same number of validation samples, and would train a mixture: " in done.stderr
    assert re.search(r"mixture: 64 on 1 rank: 0 \(.+\); none on 1 rank: 1 \(", done.stderr), done.stderr


def test_a_long_step_is_spoken_of_again_and_again(tmp_path: Path) -> None:
    said: list[tuple[int, str, float]] = []
    enough = threading.Event()

    def note(step: int, doing: str, seconds: float) -> None:
        said.append((step, doing, seconds))
        if len(said) == 3:
            enough.set()

    watchdog = Watchdog(tmp_path, 0, 1, 600, pulse=note, pulse_s=0.02)
    watchdog.beat(4, "forward")
    watchdog.start()
    try:
        assert enough.wait(30)
    finally:
        watchdog.stop()
    assert {(step, doing) for step, doing, _ in said} == {(4, "forward")}
    assert 0.02 <= said[0][2] < said[1][2] < said[2][2]
