from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.launch.failures import job_starts
from shardkit.run.watchdog import Watchdog, behind, dump_collectives
from tests.launch.jobs import REPO, command, environment, losses, run, settings


def state(rank: int, beats: int, waits: bool) -> dict[str, Any]:
    return {"rank": rank, "step": 7, "doing": "forward", "beats": beats, "at": "task.py:3 in loss", "waits": waits}


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    assert behind([state(0, 9, True), state(1, 8, True), state(2, 9, True)]).startswith(
        "did not arrive: rank 1 (step 7"
    )
    assert "rank 2" in behind([state(0, 9, True), state(1, 9, True), state(2, 9, False)])
    assert "all 2 ranks stand at the same place" in behind([state(0, 9, True), state(1, 9, True)])
    assert behind([state(0, 9, True), None]).startswith("rank(s) 1 did not even answer")


def test_ranks_that_wait_in_different_blocks_are_named_with_them() -> None:
    apart = [state(rank, 9, True) | {"block": f"layers.{rank % 2}"} for rank in range(3)]
    assert behind(apart).endswith("; last blocks: layers.0 on rank 0, 2, layers.1 on rank 1")
    assert "last blocks" not in behind([state(rank, 9, True) | {"block": "layers.0"} for rank in range(3)])


def test_who_beats_in_time_is_left_alone(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path / "hang", 0, 1, limit_s=2.0)
    dog.start()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        dog.beat(1, "forward")
        time.sleep(0.05)
    with dog.allowing(60):
        time.sleep(2.5)
    dog.stop()
    assert not (tmp_path / "hang").exists()


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


def test_who_does_not_is_ended_with_its_stacks(tmp_path: Path) -> None:
    code = (
        "import threading, pathlib; from shardkit.run.watchdog import Watchdog\n"
        f"dog = Watchdog(pathlib.Path({str(tmp_path)!r}), 0, 1, 0.5, settle_s=0.1)\n"
        "dog.start(); dog.beat(3, 'forward')\n"
        "def stuck():\n    threading.Event().wait()\n"
        "stuck()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no progress for" in done.stderr and "at step 3 (forward)" in done.stderr
    assert "in stuck" in (tmp_path / "rank_0.txt").read_text()
    assert json.loads((tmp_path / "rank_0.txt").read_text().splitlines()[0])["step"] == 3


@pytest.mark.dist
def test_a_hanging_rank_is_named_and_the_job_restarts(tmp_path: Path) -> None:
    argv = settings(tmp_path / "run", "hang", run__step_timeout_s=4, checkpoint__every_steps=1)
    done = run(command("--nproc-per-node", "2", "--max-restarts", "1", *argv), timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    ((step, reason),) = job_starts.restarts(tmp_path / "run")
    assert step == 2 and "no progress for 4 s at step 3" in reason and "did not arrive: rank 1" in reason
    assert "started 2 times; ended before: 1 x rank 0: no progress" in done.stdout
    assert "go_wrong" in (tmp_path / "run/logs/hang/rank_1.earlier.txt").read_text()
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_does_not_even_answer_is_named(tmp_path: Path) -> None:
    argv = settings(tmp_path / "run", "stop", train__max_steps=50, run__step_timeout_s=4)
    done = run(command("--nproc-per-node", "2", *argv), timeout=100)
    assert done.returncode == 1, done.stderr
    assert "rank(s) 1 did not even answer" in done.stderr, done.stderr
    assert (tmp_path / "run/logs/hang/rank_0.txt").exists()
