"""Devices and groups: what cannot work is refused, what is joined is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit.config.schema import ParallelConfig, RunConfig, RunSection
from shardkit.errors import ConfigError, LaunchError
from shardkit.launch.ranks.env import SINGLE, RankEnv
from shardkit.parallel.world import choose_device, process_groups


def config(device: str) -> RunConfig:
    return RunConfig(run=RunSection(device=device))  # type: ignore[arg-type]


def test_more_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    env = RankEnv(0, 4, 0, 4, 0, 1, "torchelastic")
    with pytest.raises(LaunchError, match="4 ranks on this machine, but torch sees 2 GPU"):
        choose_device(config("auto"), env)
    assert choose_device(config("cpu"), env).type == "cpu"


def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(config("auto"), SINGLE).type == "cpu"
    with pytest.raises(ConfigError, match="sees no GPU"):
        choose_device(config("cuda"), SINGLE)


def test_groups_are_left_on_success() -> None:
    with process_groups(config("cpu"), SINGLE) as world:
        assert world.sum([1.5, 2.0]) == [1.5, 2.0]
        assert world.gather("x") == ["x"]
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_groups_are_left_on_errors(kind: type[BaseException]) -> None:
    with pytest.raises(kind), process_groups(config("cpu"), SINGLE):
        raise kind
    assert not dist.is_initialized()


def test_a_group_of_the_callers_own_is_used_and_kept() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with process_groups(config("cpu"), SINGLE) as world:
            assert world.sum([2.0]) == [2.0]
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_task_that_srun_gave_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    env = RankEnv(3, 8, 3, 4, 0, 2, "slurm")
    with pytest.raises(LaunchError, match="4 ranks on this machine, but torch sees 1 GPU"):
        choose_device(config("auto"), env)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "h100:1")
    assert choose_device(config("auto"), env) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("parallel", "world_size", "backend", "bound"),
    [
        ({}, 1, "nccl", None),
        ({}, 2, "nccl", torch.device("cuda", 0)),
        ({"strategy": "fsdp", "offload_param": "cpu"}, 2, "cpu:gloo,cuda:nccl", None),
    ],
)
def test_groups_on_gpus_have_the_backends_that_the_strategy_needs(
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, Any],
    world_size: int,
    backend: str,
    bound: torch.device | None,
) -> None:
    """One rank is not connected to itself ahead of time; FSDP2's norm of gradients on the CPU needs gloo there."""
    joined: list[tuple[str, torch.device | None]] = []

    def join(backend: str, **given: Any) -> None:
        joined.append((backend, given["device_id"]))
        raise dist.DistStoreError("enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr("shardkit.parallel.world._store", lambda *_: dist.HashStore())
    monkeypatch.setattr("shardkit.parallel.world.flight_recorder", lambda *_: {})
    chosen = RunConfig(run=RunSection(device="cuda"), parallel=ParallelConfig(**parallel))
    with pytest.raises(LaunchError), process_groups(chosen, RankEnv(0, world_size, 0, world_size, 0, 1, "group")):
        pass
    assert joined == [(backend, bound)]
