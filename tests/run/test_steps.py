"""The time of a run is that of its steps, evaluations and saves: no gaps, nothing counted twice."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.run.evaluate import beside
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.ranks import run_ranks
from tests.run import gradients

OWN_S = 0.03
"""What whoever takes a step's record does with it."""


class Task(gradients.Task):
    """Also judged, on data of its own, by a model that takes its time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, "fine")

    def dataset(self, split: str) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        return super().dataset("train")

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.01)
        return super().loss(model, batch)


def timed(
    folder: str, own_s: float = OWN_S, to_end: bool = False, **extra: Any
) -> tuple[list[dict[str, float]], float]:
    """What a run records of its steps, and how long they took from outside; it saves after steps 3 and 6.

    `to_end`: with the save after the last step, of which no step's record tells.
    """
    settings = gradients.settings("single", folder, "fine")
    settings |= {
        "task.factory": "tests.run.test_steps:Task", "task.args": {}, "train.eval_every": 4, "train.eval_batches": 3,
        "checkpoint.every_steps": 3, "checkpoint.at_end": False, "memory.interval": 2, **extra,
    }  # fmt: skip
    records = []
    with start(None, settings) as job:
        steps = Trainer(job).steps()
        began = time.perf_counter()
        for record in steps:
            took = time.perf_counter() - began  # up to the last record: nothing is recorded of what comes after it
            records.append(record)
            time.sleep(own_s)
        if to_end:
            took = time.perf_counter() - began
    gc.collect()
    return records, took


def tiles(records: list[dict[str, float]]) -> float:
    """The sum of what the records say of time."""
    return sum(record.get(key, 0.0) for record in records for key in ("step_time_s", "eval_s", "save_s"))


@pytest.mark.dist
@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp")])
def test_steps_evaluations_and_saves_are_the_whole_of_a_runs_time(world: int, strategy: str, tmp_path: Any) -> None:
    extra = {"parallel.strategy": strategy}
    records, took = run_ranks(world, "tests.run.test_steps:timed", folder=str(tmp_path / "run"), **extra)[0]
    assert [record["step"] for record in records] == list(range(1, gradients.STEPS + 1))
    assert [record["step"] for record in records if "eval_s" in record] == [4, 8]
    assert [record["step"] for record in records if "save_s" in record] == [4, 7], "what the save before a step took"
    assert tiles(records) == pytest.approx(took, abs=0.01)
    for record in records:
        assert 0 <= record["data_wait_s"] <= record["step_time_s"]
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["step_time_s"])


def two_starts(folder: str, **extra: Any) -> list[tuple[float, float]]:
    """A run and its resumption, each saved at its end: seconds by what was recorded, and from outside."""
    found = []
    for steps in (6, 12):
        extra |= {"train.max_steps": steps, "checkpoint.at_end": True, "checkpoint.every_steps": 4}
        records, took = timed(folder, 0.0, True, **extra, **{"run.resume": steps == 12})
        saves = [json.loads(line) for line in (Path(folder) / "logs" / "checkpoints.jsonl").read_text().splitlines()]
        assert saves[-1]["step"] == steps
        found.append((tiles(records) + saves[-1]["blocking_s"], took))
    return found


@pytest.mark.dist
def test_the_time_of_each_start_of_a_run_is_recorded_whole(tmp_path: Path) -> None:
    for recorded, took in run_ranks(1, "tests.run.test_steps:two_starts", folder=str(tmp_path / "run"))[0]:
        assert recorded == pytest.approx(took, abs=0.02)


@pytest.mark.parametrize(("loss", "said"), [(2.0, "50.0 % below"), (4.0, "0.0 % below"), (6.0, "50.0 % above")])
def test_a_loss_above_the_baseline_is_said_to_be(loss: float, said: str) -> None:
    assert beside(loss, 4.0) == f"validation loss is {said}"
