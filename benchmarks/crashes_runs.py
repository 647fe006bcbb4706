"""Small runs that `benchmarks.crashes` ends, and what has to be true of their folders whenever it looks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.checkpoint import manage
from shardkit.checkpoint.native import layout
from tests.launch.tasks import Troubled

STEPS, LONG = 6, 60
"""Steps of a forked run, and of a real one."""


class Small(Troubled):
    """A linear model on fixed samples; a step takes `pace` seconds."""

    def __init__(self, config: Any, pace: float = 0.0) -> None:
        super().__init__(config, how="nothing")
        self.pace = pace

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pace)
        return super().loss(model, batch)


def settings(run_dir: Path, **extra: Any) -> list[str]:
    values = {
        "run.dir": run_dir, "run.device": "cpu", "task.factory": "benchmarks.crashes_runs:Small",
        "train.max_steps": STEPS, "train.micro_batch_size": 2, "train.grad_accum_steps": 1,
        "train.deterministic": "true", "logging.tensorboard": "false", "memory.interval": 3, "memory.plan": "false",
        "checkpoint.every_steps": 2, "checkpoint.keep_last": 2,
        **{key.replace("__", "."): value for key, value in extra.items()},
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def long_settings(run_dir: Path, pace: float) -> list[str]:
    long = settings(run_dir, train__max_steps=LONG, checkpoint__every_steps=7, task__args__pace=pace)
    return [*long, "parallel.strategy=ddp"]


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def newest(run_dir: Path) -> int:
    """The newest checkpoint's step; every folder that looks like a checkpoint must be one."""
    checkpoints = layout.checkpoints(run_dir / "checkpoints")
    for path in checkpoints:
        problems = manage.verify(path)
        check(not problems, f"{path.name}: {problems[:1]}")
    return max([layout.step_of(path) or 0 for path in checkpoints], default=0)


def check_latest(run_dir: Path) -> None:
    """A script that follows `latest` finds a checkpoint."""
    latest = run_dir / "checkpoints" / layout.LATEST
    name = latest.read_text().strip() if latest.exists() else None
    check(name is None or (latest.parent / name / "manifest.json").exists(), f"latest names {name}, which is not there")
