from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardkit.watchdog import Watchdog, behind
from tests.launch.jobs import REPO, command, environment, run, settings


def state(rank: int, beats: int, waits: bool) -> dict[str, Any]:
    return {"rank": rank, "step": 7, "doing": "forward", "beats": beats, "at": "task.py:3 in loss", "waits": waits}


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    assert behind([state(0, 9, True), state(1, 8, True), state(2, 9, True)]).startswith(
        "did not arrive: rank 1 (step 7"
    )
    assert "rank 2" in behind([state(0, 9, True), state(1, 9, True), state(2, 9, False)])
    assert "all 2 ranks stand at the same place" in behind([state(0, 9, True), state(1, 9, True)])
    assert behind([state(0, 9, True), None]).startswith("rank(s) 1 did not even answer")


def test_who_beats_in_time_is_left_alone(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path / "hang", 0, 1, limit_s=1.0)
    dog.start()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        dog.beat(1, "forward")
        time.sleep(0.05)
    with dog.allowing(60):
        time.sleep(1.5)
    dog.stop()
    assert not (tmp_path / "hang").exists()


def test_who_does_not_is_ended_with_its_stacks(tmp_path: Path) -> None:
    code = (
        "import threading, pathlib; from shardkit.watchdog import Watchdog\n"
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
@pytest.mark.parametrize(
    ("how", "said"),
    [("hang", "did not arrive: rank 1"), pytest.param("stop", "rank(s) 1 did not even answer", marks=pytest.mark.slow)],
)
def test_a_hanging_rank_ends_the_job_and_is_named(how: str, said: str, tmp_path: Path) -> None:
    argv = settings(tmp_path / "run", how, train__max_steps=50, run__step_timeout_s=4)
    done = run(command("--nproc-per-node", "2", *argv), timeout=100)
    assert done.returncode == 1, done.stderr
    assert said in done.stderr, done.stderr
    assert (tmp_path / "run/logs/hang/rank_0.txt").exists()
    if how == "hang":
        assert "go_wrong" in (tmp_path / "run/logs/hang/rank_1.txt").read_text()
    assert os.listdir(tmp_path) == ["run"]
