"""The time of a run is that of its steps, evaluations and saves: no gaps, nothing counted twice."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.ranks import run_ranks
from tests.run import gradients
from tests.timing import measured_again

OWN_S = 0.03
"""What whoever takes a step's record does with it."""
FORWARD_S = 0.01
READ_S = 0.1
LATE_S = 0.2
"""How long the run waits for its last save."""


class Task(gradients.Task):
    """Also judged, on data of its own, by a model that takes its time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, "fine")

    def dataset(self, split: str) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        return super().dataset("train")

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return super().loss(model, batch)


def settings(folder: str, **extra: Any) -> dict[str, Any]:
    """Of a run that saves after steps 3 and 6."""
    return gradients.settings("single", folder, "fine") | {
        "task.factory": "tests.run.test_steps:Task", "task.args": {}, "train.eval_every": 4,
        "train.eval_samples": 3 * gradients.ROWS,
        "checkpoint.every_steps": 3, "checkpoint.at_end": False, "memory.interval": 2, **extra,
    }  # fmt: skip


def timed(folder: str, own_s: float = OWN_S, **extra: Any) -> tuple[list[dict[str, float]], float]:
    """What a run records of its steps, and how long they took from outside."""
    records = []
    with start(None, settings(folder, **extra)) as job:
        steps = Trainer(job).steps()
        began = time.perf_counter()
        for record in steps:
            took = time.perf_counter() - began  # up to the last record: nothing is recorded of what comes after it
            records.append(record)
            time.sleep(own_s)
    gc.collect()
    return records, took


def tiles(records: list[dict[str, float]]) -> float:
    """The sum of what the records say of time."""
    return sum(record.get(key, 0.0) for record in records for key in ("step_time_s", "eval_s", "save_s", "end_save_s"))


@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp")])
@measured_again
def test_steps_evaluations_and_saves_are_the_whole_of_a_runs_time(world: int, strategy: str, tmp_path: Any) -> None:
    extra = {"parallel.strategy": strategy}
    records, took = run_ranks(world, "tests.run.test_steps:timed", folder=str(tmp_path / "run"), **extra)[0]
    assert [record["step"] for record in records] == list(range(1, gradients.STEPS + 1))
    assert [record["step"] for record in records if "eval_s" in record] == [4, 8]
    assert [record["step"] for record in records if "save_s" in record] == [4, 7], "what the save before a step took"
    assert tiles(records) == pytest.approx(took, abs=0.01)
    for record in records:
        parts = [record[key] for key in ("data_wait_s", "forward_s", "backward_s", "update_s")]
        assert min(parts) >= 0 and parts[1] >= FORWARD_S and sum(parts) <= record["step_time_s"]
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["step_time_s"])


class Slow(list[Any]):
    """Data whose samples take their time."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(READ_S)
        return super().__getitem__(index)


class SlowTask(Task):
    def dataset(self, split: str) -> Any:
        return Slow(super().dataset(split) or [])


@pytest.mark.parametrize("steps", [1, 3])
@measured_again
def test_reading_data_is_no_part_of_backward(steps: int, tmp_path: Any) -> None:
    """The next step's are read between backward and update, the first's before forward, none in the last."""
    extra = {"task.factory": "tests.run.test_steps:SlowTask", "train.max_steps": steps, "train.eval_every": None}
    records, took = run_ranks(1, "tests.run.test_steps:timed", folder=str(tmp_path / "run"), **extra)[0]
    read = [record["data_wait_s"] > READ_S for record in records]
    assert read == ([True] if steps == 1 else [True, True, False])
    assert all(0 <= record["backward_s"] < READ_S for record in records)
    assert tiles(records) == pytest.approx(took, abs=0.01)


class Clocked(Trainer):
    """Notes when its first step began."""

    def steps(self) -> Iterator[dict[str, float]]:
        self.began = time.perf_counter()
        yield from super().steps()


def late(check: Callable[[], None]) -> None:
    time.sleep(LATE_S)
    check()


def two_starts(folder: str, **extra: Any) -> list[tuple[float, float]]:
    """A run and its resumption, each saved at its end: seconds by `metrics.jsonl`, and from outside."""
    found = []
    for first, last in ((1, 6), (7, 12)):
        ends = {"train.max_steps": last, "checkpoint.at_end": True, "run.resume": first > 1, **extra}
        with start(None, settings(folder, **ends)) as job:
            trainer = Clocked(job)
            trainer.checkpoints.check_last = partial(late, trainer.checkpoints.check_last)
            list(trainer.recorded_steps())
            took = time.perf_counter() - trainer.began
        gc.collect()
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(1, last + 1)), "a line each"
        found.append((tiles(records[first - 1 :]), took))
    return found


@pytest.mark.parametrize("in_background", [False, True])
@measured_again
def test_the_time_of_each_start_of_a_run_is_recorded_whole(in_background: bool, tmp_path: Path) -> None:
    """With the save after the last step, and the wait for one that still runs in the background."""
    extra = {"checkpoint.async_save": in_background}
    for recorded, took in run_ranks(1, "tests.run.test_steps:two_starts", folder=str(tmp_path / "run"), **extra)[0]:
        assert recorded == pytest.approx(took, abs=0.02)
