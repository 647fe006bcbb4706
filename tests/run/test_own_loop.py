"""`job.step` in a loop of one's own: sums, means and losses that are neither; a step is gone with its data after it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardkit.errors import ConfigError, TrainingError
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.ranks import run_ranks
from tests.run import gradients

STEPS, CLASSES = 5, 4
Batch = tuple[torch.Tensor, torch.Tensor]


def settings(strategy: str, **extra: Any) -> dict[str, Any]:
    return {
        "run.device": "cpu", "parallel.strategy": strategy, "train.grad_accum_steps": 2, "optim.name": "sgd",
        "optim.lr": 0.1, "train.max_norm": None, **extra,
    }  # fmt: skip


def batches(step: int, ragged: bool = True) -> list[Batch]:
    """This rank's two micro-batches, whose sizes differ."""
    rank = dist.get_rank()
    out = []
    for index in range(2):
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + index)
        x = torch.randn((2 + 5 * index + 3 * rank) if ragged else 6, CLASSES, generator=generator)
        out.append((x, x.argmax(dim=1)))
    return out


def wrap(job: Any) -> None:
    torch.manual_seed(0)
    job.wrap(nn.Sequential(nn.Linear(CLASSES, 16), nn.Tanh(), nn.Linear(16, CLASSES)))


def count(batch: Batch) -> int:
    return len(batch[1])


def loss_fn(reduction: str) -> Any:
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


@contextmanager
def warned() -> Iterator[list[str]]:
    """What is warned of inside."""
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardkit").addHandler(handler)
    yield lines
    logging.getLogger("shardkit").removeHandler(handler)


def curves(strategies: list[str]) -> dict[str, Any]:
    """(losses and norms, warnings) of sums, of means that are said to be, and of means that are not."""
    out = {}
    for strategy in strategies:
        for case, of, said_to_be in (("sum", "sum", "sum"), ("mean", "mean", "mean"), ("wrong", "mean", "sum")):
            with warned() as said, start(None, settings(strategy)) as job:
                wrap(job)
                steps = [job.step(batches(i), loss_fn(of), count, reduction=said_to_be) for i in range(STEPS)]
            out[strategy, case] = [(step.loss, step.grad_norm) for step in steps], said
            gc.collect()
    return out


def even() -> list[str]:
    """Warnings of a mean whose micro-batches are equally large: nothing can be told."""
    with warned() as said, start(None, settings("single")) as job:
        wrap(job)
        for step in range(40):
            job.step(batches(step, ragged=False), loss_fn("mean"), count)
    return said


def refusals() -> list[str]:
    """What wrong losses and words end with."""
    found = []
    gone = {"nan": float("nan")}
    for loss, extra in (
        (loss_fn("none"), {}),
        (lambda model, batch: 1.5, {}),
        (loss_fn("sum"), {"reduction": "max"}),
        (lambda model, batch: model(batch[0]).sum() * gone["nan"], {}),
    ):
        with start(None, settings("single")) as job:
            wrap(job)
            try:
                job.step(batches(0), loss, count, **extra)
            except (ConfigError, TrainingError) as error:
                found.append(str(error))
        gc.collect()
    return found


def test_a_mean_that_is_said_to_be_one_trains_as_the_sum_does() -> None:
    ranks = run_ranks(2, "tests.run.test_own_loop:curves", strategies=["ddp", "fsdp", "zero2"])
    whole = ranks[0]["ddp", "sum"][0]
    for index, rank in enumerate(ranks):
        for (strategy, case), (curve, said) in rank.items():
            if case == "wrong":
                assert curve[0][1] < whole[0][1] / 2, "the gradient of a mean is too small"
                if index:
                    assert said == [], "rank 0 says it"
                    continue
                assert len(said) == 1 and "the loss of job.step does not grow with its targets" in said[0], said
                assert "fix: pass reduction='mean'" in said[0]
            else:
                assert sum(curve, ()) == pytest.approx(sum(whole, ()), abs=1e-6), (strategy, case)
                assert said == [], (strategy, case)


def test_what_is_no_sum_is_said_in_a_line_or_not_at_all() -> None:
    assert run_ranks(1, "tests.run.test_own_loop:even") == [[]]
    ((vector, number, word, loss),) = run_ranks(1, "tests.run.test_own_loop:refusals")
    assert "the loss function returned a tensor of shape (2,), not one number" in vector and "loss.sum()" in vector
    assert "returned float, not one number" in number
    assert "reduction='max'" in word and "'mean'" in word
    assert "the loss is not finite at step 1 on rank 0" in loss


@pytest.fixture
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


@pytest.mark.usefixtures("without_collections")
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


@pytest.mark.usefixtures("without_collections")
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
