"""Bytes of a checkpoint that each rank reads when a run resumes, and whether it then holds the saved values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from shardkit.checkpoint import resume
from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.run.job import Job, start
from tests.strategies.cases import on_cpus

WIDTH = 1024
Reads = tuple[int, int, bool]


class Layers(nn.Sequential):
    """Two layers of 4 MiB, a frozen one, and small parameters and buffers."""

    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        layers[1].requires_grad_(False)
        super().__init__(*layers, nn.BatchNorm1d(WIDTH))


def _values(strategy: Any) -> dict[str, torch.Tensor]:
    return {f"{shard.name} {shard.start}": shard.local.clone() for shard in strategy.load_targets()}


def resumed(root: str, strategies: list[str], bucket_bytes: int, local_size: int = 0) -> dict[str, Reads]:
    """Strategy → bytes that this rank read, bytes of the checkpoint's data, whether all values are the saved ones.

    Args:
        strategies: their names.
        local_size: ranks of a node; 0 = all.
    """
    if local_size:
        os.environ |= {"LOCAL_WORLD_SIZE": str(local_size), "LOCAL_RANK": str(int(os.environ["RANK"]) % local_size)}
    resume.BUCKET_BYTES = bucket_bytes
    return {name: _resumed(f"{root}/{name}", on_cpus(name)) for name in strategies}


def _resumed(folder: str, settings: dict[str, Any]) -> Reads:
    with _started(settings, folder, seed=0) as (job, checkpoints):
        torch.manual_seed(0)  # without synchronisation, ranks' batch-norm statistics follow their data
        job.step([torch.randn(8, WIDTH)], lambda model, rows: model(rows).square().sum(), len)
        checkpoints.save(RunState(step=1, seed=0))
        saved = _values(job.strategy)
    with _started(settings, folder, seed=1) as (job, checkpoints), _counting() as reads:
        loaded = checkpoints.resume(folder)
        values = _values(job.strategy)
        same = values.keys() == saved.keys() and all(torch.equal(values[key], saved[key]) for key in values)
        return sum(reads), sum(file.stat().st_size for file in loaded[0].glob("rank_*.bin")), same


@contextmanager
def _started(settings: dict[str, Any], folder: str, seed: int) -> Iterator[tuple[Job, Checkpointer]]:
    with start(None, {**settings, "train.seed": seed}) as job:
        job.wrap(Layers)
        checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, folder, timeout_s=60)
        yield job, checkpoints
        checkpoints.close()


@contextmanager
def _counting() -> Iterator[list[int]]:
    """The bytes of every read."""
    reads: list[int] = []
    real = os.preadv

    def counted(*args: Any) -> int:
        reads.append(real(*args))
        return reads[-1]

    with patch.object(os, "preadv", counted):
        yield reads
