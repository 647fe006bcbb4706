"""Train, save and load under any strategy at any world size, and say what this rank then holds."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.checkpoint.checkpointer import Checkpointer
from shardkit.checkpoint.manifest import RunState
from shardkit.job import Job, start
from tests.strategies import cases

SAVED_AT, GO_ON = 3, 4
"""Steps before the save, and losses compared after it."""
CASES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero3+optimizer")
WORLDS = {"single": (1,), "hsdp": (4,)}
"""World sizes of a case; all of 1, 2, 3 and 4 where it is not named."""


def worlds(case: str) -> tuple[int, ...]:
    return WORLDS.get(case, (1, 2, 3, 4))


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


def save_all(names: list[str], root: str, **extra: Any) -> dict[str, list[float]]:
    """Train each case SAVED_AT steps and save it to root/<case>@<world>; the losses of the steps after that."""
    world, out = dist.get_world_size(), {}
    for case in names:
        with start(None, settings(case, world, **extra)) as job:
            cases.wrap(job)
            checkpoints = checkpointer(job, Path(root) / f"{case}@{world}")
            steps(job, 0, SAVED_AT)
            checkpoints.save(RunState(step=SAVED_AT))
            checkpoints.close()
            out[case] = steps(job, SAVED_AT, GO_ON)
        gc.collect()
    return out


def load_all(
    pairs: list[tuple[str, str]], root: str, count: int = GO_ON, **extra: Any
) -> dict[tuple[str, str], tuple[list[str], list[float]]]:
    """Load root/<source> into each target case; (names not equal to the file's, next losses) of each pair."""
    world, out = dist.get_world_size(), {}
    for target in dict.fromkeys(target for _, target in pairs):
        with start(None, settings(target, world, **extra)) as job:
            cases.wrap(job)
            checkpoints = checkpointer(job, Path(root) / f"{target}@{world}")
            for source in [s for s, t in pairs if t == target]:
                found = checkpoints.resume(Path(root) / source)
                assert found is not None
                differing = differences(job, found[0])
                out[source, target] = (differing, steps(job, found[1].step, count))
            checkpoints.close()
        gc.collect()
    return out


def differences(job: Job, path: Path) -> list[str]:
    """Names of this rank's shards that are not bit for bit what the checkpoint holds."""
    from shardkit.checkpoint.reader import CheckpointReader

    bad, seen = [], set()
    with CheckpointReader(path) as checkpoint:
        for shard in job.strategy.load_targets():
            seen.add(shard.name)
            saved = checkpoint.read(shard.name, shard.start, shard.local.numel())
            if not torch.equal(shard.local.view(torch.uint8), saved.view(torch.uint8)):
                bad.append(shard.name)
        if job.strategy.scalars() != checkpoint.manifest.scalars:
            bad.append("scalars")
    assert any(name.startswith("optim.") for name in seen)
    return bad
