"""A model with everything that is not a plain trained weight, saved under one strategy and loaded under others."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.checkpoint.native.manifest import RunState
from shardkit.run.job import Job, start
from tests.checkpoint import cases
from tests.strategies.cases import on_cpus


class Odd(nn.Module):
    """Tied and frozen weights, batch-norm statistics, a buffer that is not saved, sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.back = nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.embed(tokens)))
        return self.head(self.back(hidden) * self.scale)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, 0]), batch[:, 1], reduction="sum")


def build(job: Job) -> None:
    torch.manual_seed(0)
    job.wrap(Odd())


def train(job: Job, steps: int) -> None:
    world = job.world
    for step in range(steps):
        chance = torch.Generator().manual_seed(step)
        batches = torch.randint(0, 11, (2, 12, 2), generator=chance)
        job.step([b.chunk(world.size)[world.rank] for b in batches], loss_fn, len)


def settings(strategy: str) -> dict[str, Any]:
    return {**on_cpus(strategy), "train.grad_accum_steps": 2}


def save(strategies: list[str], root: str) -> dict[str, float]:
    """Train and save under each strategy; how far the statistics moved."""
    moved = {}
    for strategy in strategies:
        with start(None, settings(strategy)) as job:
            build(job)
            train(job, 3)
            checkpoints = cases.checkpointer(job, Path(root) / strategy)
            checkpoints.save(RunState(step=3))
            checkpoints.close()
            buffers = {s.name: s.local for s in job.strategy.shards() if s.name.startswith("buffer.")}
            moved[strategy] = float(buffers["buffer.norm.running_mean"].abs().sum())
        gc.collect()
    return moved


def load(strategies: list[str], root: str) -> dict[tuple[str, str], list[str]]:
    """Load each saved checkpoint under each strategy; what differs from the file."""
    out = {}
    for strategy in strategies:
        with start(None, settings(strategy)) as job:
            build(job)
            checkpoints = cases.checkpointer(job, Path(root) / f"{strategy}-{dist.get_world_size()}")
            for source in sorted(p for p in Path(root).iterdir() if (p / "latest").exists()):
                found = checkpoints.resume(source)
                out[source.name, strategy] = cases.differences(job, found[0])
            train(job, 1)
            checkpoints.close()
        gc.collect()
    return out


class ByRows(torch.optim.SGD):
    """Keeps one number for each row of a parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = torch.zeros(param.shape[0])
        return super().step(closure)


def save_with(optimizers: dict[str, dict[str, Any]], strategy: str, root: str) -> None:
    """Train two steps with each of some of torch's optimizers, save, load."""
    for optimizer, options in optimizers.items():
        with start(None, settings(strategy)) as job:
            torch.manual_seed(0)
            make = partial(getattr(torch.optim, optimizer, ByRows), lr=0.1, **options)
            job.wrap(nn.Linear(6, 4), lambda model, make=make: make(model.parameters()))
            checkpoints = cases.checkpointer(job, f"{root}/{optimizer}")
            for _ in range(2):
                job.step([torch.ones(2, 6)] * 2, lambda model, x: model(x).square().sum(), len)
            checkpoints.save(RunState(step=2))
            checkpoints.resume(f"{root}/{optimizer}")
            assert cases.differences(job, Path(root, optimizer, "step_00000002")) == []
            checkpoints.close()
