"""Checkpoints of CUDA runs, saved in the background, go on on the CPU, and back on CUDA on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda import gpu_ranks
from tests.cuda.parity import LATE
from tests.emulated_cuda import needs_emulation
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.deepspeed, needs_emulation]

HAND_ON = "tests.cuda.checkpoint_ranks:hand_on"
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


def test_the_hosts_copy_is_whole_when_training_goes_on() -> None:
    assert gpu_ranks(1, "tests.cuda.checkpoint_ranks:staged", env=LATE) == [[]]
