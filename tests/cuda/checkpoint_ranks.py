"""What ranks do that hand a checkpoint from CUDA to the CPU and back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.checkpoint.native import layout
from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.native.reader import CheckpointReader
from shardkit.checkpoint.save import Staging
from shardkit.run.job import Job, start
from tests.checkpoint import cases
from tests.cuda.parity_ranks import join

SCALE = "engine.loss_scaler.cur_scale"
"""Name under which a checkpoint has fp16's loss scale."""
Found = tuple[str, str, list[str], list[float]]
"""Source, target case, names of what was not loaded or written as it was, losses of the next steps."""
Piece = tuple[str, int, torch.Tensor]
"""Name, first element, values."""


def hand_on(
    names: list[str], sources: list[str], root: str, device: str, backend: str = "nccl", **extra: Any
) -> list[Found]:
    """Each case loads every source below `root`, or trains where there is none; then it saves there, asynchronously.

    The steps after a save are taken while it is written.
    """
    if device == "cuda":
        join(backend)
    out: list[Found] = []
    for name in names:
        settings = cases.settings(
            name, dist.get_world_size(), **{"run.device": device, "checkpoint.async_save": True, **extra}
        )
        for source, differing, losses in _hand_on(name, sources or [""], Path(root), settings):
            out.append((source, name, differing, losses))
        gc.collect()
    return out


def _hand_on(
    name: str, sources: list[str], root: Path, settings: dict[str, Any]
) -> Iterator[tuple[str, list[str], list[float]]]:
    folder = root / f"{name}@{dist.get_world_size()}"
    with start(None, settings) as job:
        cases.cases.wrap(job)
        checkpoints = cases.checkpointer(job, folder)
        for source in sources:
            differing: list[str] = []
            if source:
                found = checkpoints.resume(root / source)
                assert found is not None and found[1].step == cases.SAVED_AT
                differing = cases.differences(job, found[0]) + other_scale(job, found[0])
            else:
                cases.steps(job, 0, cases.SAVED_AT)
            kept: list[Piece] = []
            if source == sources[-1]:
                kept = [(shard.name, shard.start, shard.local.cpu().clone()) for shard in job.strategy.shards()]
                checkpoints.save(RunState(step=cases.SAVED_AT))
            losses = cases.steps(job, cases.SAVED_AT, cases.GO_ON)
            checkpoints.wait()
            yield source, differing + (otherwise(layout.checkpoints(folder)[-1], kept) if kept else []), losses
        checkpoints.close()


def other_scale(job: Job, path: Path) -> list[str]:
    """Whether fp16 goes on with another loss scale than was saved."""
    with CheckpointReader(path) as checkpoint:
        saved = checkpoint.manifest.scalars.get(SCALE)
    return [] if saved in (None, job.strategy.loss_scale()) else ["the loss scale"]


def otherwise(path: Path, kept: list[Piece]) -> list[str]:
    """Names of what a checkpoint has otherwise than this rank had it."""
    with CheckpointReader(path) as checkpoint:
        return [
            f"{name} as written"
            for name, first, local in kept
            if not torch.equal(checkpoint.read(name, first, local.numel()).view(torch.uint8), local.view(torch.uint8))
        ]


def staged() -> list[str]:
    """Names of what the host's copy of a rank's state has otherwise than the state, as soon as it is there."""
    join("nccl")
    with start(None, cases.settings("single", 1, **{"run.device": "cuda"})) as job:
        cases.cases.wrap(job)
        cases.steps(job, 0, 1)
        shards = list(job.strategy.shards())
        kept = {shard.name: shard.local.clone() for shard in Staging(job.world.device).copy(shards)}
        return [shard.name for shard in shards if not torch.equal(kept[shard.name], shard.local.cpu())]
