"""A step is gone with its data when the next one begins, though Python's garbage collector may not run for long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.run import gradients

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Watch:
    """Which of the tensors that it was shown, in that order, are still there."""

    def __init__(self) -> None:
        self._shown: list[weakref.ref[torch.Tensor]] = []

    def show(self, tensor: torch.Tensor) -> None:
        self._shown.append(weakref.ref(tensor))

    def alive(self) -> list[int]:
        return [number for number, shown in enumerate(self._shown, start=1) if shown() is not None]


def test_the_training_loop_holds_the_data_of_a_step_and_the_next(tmp_path: Path) -> None:
    watch, alive = Watch(), []
    settings = gradients.settings("single", str(tmp_path / "run"), "fine") | {"checkpoint.every_steps": None}
    with start(None, settings) as job:
        trainer = Trainer(job)
        forward_loss = trainer.loop.loss_fn

        def watched(model: Any, batch: Batch) -> torch.Tensor:
            watch.show(batch[0])
            alive.append(watch.alive())
            return forward_loss(model, batch)

        trainer.loop.loss_fn = watched
        trainer.fit()
    assert alive == [[step] for step in range(1, gradients.STEPS + 1)]


def test_a_loop_of_ones_own_decides_how_long_data_live() -> None:
    watch = Watch()

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().sum()

    with start(None, {"run.device": "cpu", "parallel.strategy": "single"}) as job:
        job.wrap(nn.Linear(4, 1))
        for _ in range(3):
            batch = torch.ones(2, 4)
            watch.show(batch)
            job.step([batch], loss_fn, len)
            del batch
            assert watch.alive() == []
