"""Checkpoints of CUDA runs, saved in the background, go on on the CPU, and back on CUDA on another number of ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit.checkpoint.native import layout
from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.native.reader import CheckpointReader
from shardkit.run.job import Job, start
from tests.checkpoint import cases
from tests.cuda import gpu_ranks
from tests.cuda.parity import LATE
from tests.cuda.parity_ranks import join
from tests.emulated_cuda import needs_emulation
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_emulation]

HAND_ON = "tests.cuda.test_checkpoint:hand_on"
Key = tuple[str, str]
"""Source and target, `case@ranks` each; the source is empty for a run that was never loaded."""


def stage(world: int, device: str, names: list[str], sources: list[str], root: Path, **more: Any) -> dict[Key, Any]:
    """(differing, losses) of every rank by source and target."""
    start = gpu_ranks if device == "cuda" else run_ranks
    ranks = start(world, HAND_ON, names=names, sources=sources, root=str(root), device=device, **more)
    found: dict[Key, Any] = {}
    for rank in ranks:
        for source, name, differing, losses in rank:
            found.setdefault((source, f"{name}@{world}"), []).append((differing, losses))
    return found


def check(found: dict[Key, Any], wanted: list[float], limit: float) -> None:
    for (source, target), ranks in found.items():
        for differing, losses in ranks:
            assert differing == [], f"{source} → {target}"
            assert losses == pytest.approx(wanted, abs=limit), f"{source} → {target}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "limit"), [("fp32", 1e-5), pytest.param("bf16", 2e-3, marks=pytest.mark.release)])
def test_cuda_to_the_cpu_and_back_at_another_world_size(mode: str, limit: float, tmp_path: Path) -> None:
    more: dict[str, Any] = {"precision.mode": mode, "train.ema_decay": 0.5}
    names = ["ddp", "fsdp", "zero1", "zero3", "zero3+optimizer+param"]
    first = stage(2, "cuda", names, [], tmp_path, env=LATE, **more)
    ((_, wanted), *_) = first["", "ddp@2"]
    check(first, wanted, limit)
    second = stage(3, "cpu", ["zero2", "fsdp"], [target for _, target in first], tmp_path, **more)
    assert len(second) == 2 * len(names)
    check(second, wanted, limit)
    third = stage(4, "cuda", ["hsdp", "zero3"], ["zero2@3", "fsdp@3"], tmp_path, env=LATE, **more)
    assert len(third) == 4
    check(third, wanted, limit)


def test_parameters_in_host_memory_go_to_the_cpu_and_back(tmp_path: Path) -> None:
    first = stage(2, "cuda", ["fsdp+param"], [], tmp_path, backend="cpu:gloo,cuda:nccl", env=LATE)
    ((_, wanted), *_) = first["", "fsdp+param@2"]
    check(first, wanted, 1e-5)
    second = stage(1, "cpu", ["single"], ["fsdp+param@2"], tmp_path)
    check(second, wanted, 1e-5)
    check(
        stage(3, "cuda", ["fsdp+param"], ["single@1"], tmp_path, backend="cpu:gloo,cuda:nccl", env=LATE), wanted, 1e-5
    )


def test_the_loss_scale_goes_along(tmp_path: Path) -> None:
    more: dict[str, Any] = {"precision.mode": "fp16", "precision.loss_scale_window": 2}
    first = stage(2, "cuda", ["ddp", "zero2"], [], tmp_path, **more, **{"precision.loss_scale_init_power": 10})
    ((_, wanted), *_) = first["", "ddp@2"]
    check(first, wanted, 2e-3)
    second = stage(1, "cuda", ["zero3", "single"], ["ddp@2", "zero2@2"], tmp_path, **more)
    for (source, target), ((differing, losses),) in second.items():
        # Engines count the steps since an overflow each in their own way.
        assert set(differing) <= {"scalars"}, f"{source} → {target}"
        assert losses == pytest.approx(wanted, abs=2e-3), f"{source} → {target}"


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
