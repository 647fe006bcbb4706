"""Where a third step would be like the second, it is repeated in the log instead of traced: nothing differs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from shardkit.memory.tracing.events import EventLog, repeat_last_step
from tests.commands import environment
from tests.ranks import REPO

JOBS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"settings": ["precision.mode=bf16"]},
    "fsdp, evaluated": {"settings": ["train.eval_every=1", "train.eval_samples=4", "activation.policy=full"]},
    "fsdp, fp16": {"settings": ["precision.mode=fp16"]},
    "zero2": {"settings": ["precision.mode=bf16"]},
    "zero3": {"settings": ["precision.mode=bf16", "activation.policy=full"]},
    "zero3 offloaded": {"settings": ["parallel.offload_optimizer=cpu", "parallel.offload_param=cpu"]},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_steps_are_logged_as_if_all_of_them_had_been_traced() -> None:
    jobs = [
        {"settings": [f"parallel.strategy={re.split('[ ,]', name)[0]}", *JOBS[name].get("settings", [])]}
        for name in JOBS
    ]
    words = [sys.executable, "-X", "faulthandler", "-m", "tests.plan.repeat_run", json.dumps(jobs)]
    done = subprocess.run(
        words, cwd=REPO, text=True, capture_output=True,
        env=environment({"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    answers = dict(zip(JOBS, lines, strict=True))
    assert {name: answer["different"] for name, answer in answers.items() if answer["different"]} == {}
    assert [name for name, answer in answers.items() if answer["repeated"] != [True]] == []


def log_of(*steps: list[tuple[int, int]]) -> EventLog:
    """A log whose steps change the sizes of these storages; each ends with a mark."""
    log = EventLog()
    for step in steps:
        log.mark("forward")
        for index, n_bytes in step:
            while len(log.allocations) <= index:
                log.made("cuda:0", "aten::mm")
            log.changed(index, n_bytes)
        log.mark("between")
    return log


def test_what_a_step_leaves_takes_the_place_of_what_it_frees() -> None:
    log = log_of([(0, 8), (1, 4)], [(1, -4), (2, 2), (2, -2), (3, 4)])
    assert repeat_last_step(log, "between")
    assert log.events == [(0, 8), (1, 4), (1, -4), (4, 2), (4, -2), (5, 4), (5, -4), (2, 2), (2, -2), (3, 4)]
    assert [at for at, phase, _ in log.marks if phase == "between"] == [2, 6, 10]


@pytest.mark.parametrize("step", [[(2, 4)], [(1, -4)], [(1, -4), (2, 5)], [(1, 2)]], ids=str)
def test_a_step_that_would_not_repeat_itself_is_left_alone(step: list[tuple[int, int]]) -> None:
    log = log_of([(0, 8), (1, 4)], step)
    before = list(log.events)
    assert not repeat_last_step(log, "between")
    assert log.events == before
