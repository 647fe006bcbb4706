"""Train, save and load under any strategy at any world size, and say what this rank then holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.run.job import Job, start
from tests.strategies import cases

SAVED_AT, GO_ON = 3, 4
"""Steps before the save, and losses compared after it."""
CASES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero3+optimizer+param")


def settings(case: str, world: int, **extra: Any) -> dict[str, Any]:
    return cases.overrides(case, world, "adamw_clipped", **{"optim.warmup_steps": 0, **extra})


def checkpointer(job: Job, root: str | Path, **options: Any) -> Checkpointer:
    # Small chunks, so that even this model's tensors are cut.
    return Checkpointer(
        job.strategy, job.world, job.config.checkpoint, root, timeout_s=60, **{"chunk_bytes": 1024, **options}
    )


def steps(job: Job, first: int, count: int) -> list[float]:
    world = job.world
    return [
        job.step(cases.micro_batches(i, world.rank, world.size), cases.loss_fn, cases.n_targets).loss
        for i in range(first, first + count)
    ]


Found = tuple[str, str, str, list[str], list[float]]
"""Precision, source, target case, names of what was not loaded as saved, losses of the next steps."""


def exchange(names: list[str], sources: list[str], saves: bool, root: str, modes: list[str]) -> list[Found]:
    """Each case loads every source in root/<mode>/<source>, or trains SAVED_AT steps; then it saves itself there."""
    found: list[Found] = []
    for mode in modes:
        for name in names:
            for source, differing, losses in _exchange(name, sources or [""], saves, Path(root) / mode):
                found.append((mode, source, name, differing, losses))
            gc.collect()
    return found


def _exchange(name: str, sources: list[str], saves: bool, folder: Path) -> Iterator[tuple[str, list[str], list[float]]]:
    world = dist.get_world_size()
    with start(None, settings(name, world, **{"precision.mode": folder.name})) as job:
        cases.wrap(job)
        checkpoints = checkpointer(job, folder / f"{name}@{world}")
        for source in sources:
            differing: list[str] = []
            if source:
                found = checkpoints.resume(folder / source)
                assert found is not None and found[1].step == SAVED_AT
                differing = differences(job, found[0])
            else:
                steps(job, 0, SAVED_AT)
            if saves and source == sources[-1]:
                checkpoints.save(RunState(step=SAVED_AT))
            yield source, differing, steps(job, SAVED_AT, GO_ON)
        checkpoints.close()


def differences(job: Job, path: Path) -> list[str]:
    """Names of this rank's shards that are not bit for bit what the checkpoint holds."""
    from shardkit.checkpoint.native.reader import CheckpointReader

    bad, seen = [], set()
    with CheckpointReader(path) as checkpoint:
        for shard in job.strategy.load_targets():
            seen.add(shard.name)
            saved = checkpoint.read(shard.name, shard.start, shard.local.numel())
            if not torch.equal(shard.local.cpu().view(torch.uint8), saved.view(torch.uint8)):
                bad.append(shard.name)
        if job.strategy.scalars() != checkpoint.manifest.scalars:
            bad.append("scalars")
    assert any(name.startswith("optim.") for name in seen)
    return bad
