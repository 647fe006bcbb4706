"""What ranks do that hand a checkpoint from CUDA to the CPU and back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.checkpoint.format.manifest import RunState
from shardkit.checkpoint.format.reader import CheckpointReader
from shardkit.run.job import Job, start
from tests.checkpoint import cases
from tests.cuda.parity_ranks import join

Found = tuple[str, str, list[str], list[float]]
"""Source, target case, names of what was not loaded as saved, losses of the next steps."""


def hand_on(
    names: list[str],
    sources: list[str],
    root: str,
    device: str,
    saves: bool = True,
    backend: str = "nccl",
    **extra: Any,
) -> list[Found]:
    """Each case loads every source below `root`, or trains where there is none; then it saves there, in the background.

    The steps after a save are taken while it is written.
    """
    if device == "cuda":
        join(backend)
    out: list[Found] = []
    for name in names:
        out += [
            (source, name, *rest) for source, *rest in _hand_on(name, sources or [""], Path(root), device, saves, extra)
        ]
        gc.collect()
    return out


def _hand_on(
    name: str, sources: list[str], root: Path, device: str, saves: bool, extra: dict[str, Any]
) -> Iterator[tuple[str, list[str], list[float]]]:
    world = dist.get_world_size()
    settings = cases.settings(name, world, **{"run.device": device, "checkpoint.async_save": True, **extra})
    with start(None, settings) as job:
        cases.cases.wrap(job)
        checkpoints = cases.checkpointer(job, root / f"{name}@{world}")
        for source in sources:
            differing: list[str] = []
            if source:
                found = checkpoints.resume(root / source)
                assert found is not None and found[1].step == cases.SAVED_AT
                differing = cases.differences(job, found[0])
            else:
                cases.steps(job, 0, cases.SAVED_AT)
            if saves and source == sources[-1]:
                kept = {shard.name: (shard.start, shard.local.cpu().clone()) for shard in job.strategy.shards()}
                checkpoints.save(RunState(step=cases.SAVED_AT))
                losses = cases.steps(job, cases.SAVED_AT, cases.GO_ON)
                checkpoints.wait()
                differing += [f"{name} as written" for name in written_otherwise(root / f"{name}@{world}", kept)]
            else:
                losses = cases.steps(job, cases.SAVED_AT, cases.GO_ON)
            yield source, differing, losses
        checkpoints.close()


def written_otherwise(folder: Path, kept: dict[str, tuple[int, torch.Tensor]]) -> list[str]:
    """Names of what the newest checkpoint of a folder has otherwise than this rank had it."""
    newest = max((path for path in folder.rglob("*") if path.is_dir()), key=lambda path: len(list(path.iterdir())))
    with CheckpointReader(newest) as checkpoint:
        return [
            name
            for name, (first, local) in kept.items()
            if not torch.equal(checkpoint.read(name, first, local.numel()).view(torch.uint8), local.view(torch.uint8))
        ]


def unwaited_copy(job: Job) -> None: ...
