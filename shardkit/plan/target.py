"""What a job is planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import RunConfig
from ..errors import ConfigError
from .gpus import DEFAULT, GPUS, Gpu, find_gpu, parse_bytes


@dataclass(frozen=True)
class Target:
    """Ranks and what each of them has.

    Attributes:
        gpu: the card; `None` plans a run on CPUs.
        ranks_per_node: ranks on one machine.
        rank: whose memory; 0 holds the largest shard.
        expandable: the allocator's segments can grow, as shardkit sets it by default.
        host_memory: bytes of host memory for each rank; `None` = not asked.
        cap: bytes that a rank may use for tensors where there is no card.
    """

    world_size: int
    gpu: Gpu | None
    ranks_per_node: int
    rank: int = 0
    expandable: bool = True
    host_memory: int | None = None
    cap: int | None = None

    @property
    def device_memory(self) -> int | None:
        return self.cap if self.gpu is None else self.gpu.memory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Target:
        gpu = obj["gpu"]
        return cls(**{**obj, "gpu": Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) if gpu else None})


def choose_target(
    config: RunConfig,
    gpus: int = 1,
    gpus_per_node: int = 8,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
) -> Target:
    """The target that options name.

    Args:
        gpu: a card of the table; default: the smallest with `gpu_memory`, else h100. Nothing and run.device=cpu: CPUs.
        gpu_memory: of each card; wins over the table's.
        host_memory: of each machine.

    Raises:
        ConfigError: an unknown card, an amount of memory that is none, or a number of GPUs below 1.
    """
    for name, number in (("--gpus", gpus), ("--gpus-per-node", gpus_per_node)):
        if number < 1:
            raise ConfigError(f"{name} {number} is no number of GPUs", "ask for 1 or more")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ConfigError(
            f"--gpus {gpus} is no whole number of machines with --gpus-per-node {gpus_per_node}",
            f"ask for {gpus // gpus_per_node * gpus_per_node} or {-(-gpus // gpus_per_node) * gpus_per_node} GPUs",
        )
    per_node = min(gpus, gpus_per_node)
    on_host = None if host_memory is None else parse_bytes(host_memory, "--host-memory") // per_node
    card = _card(gpu, gpu_memory)
    if card is None and config.run.device != "cpu":
        card = GPUS[DEFAULT]
    return Target(gpus, card, per_node, host_memory=on_host)


def _card(gpu: str | None, gpu_memory: str | None) -> Gpu | None:
    memory = None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory")
    if gpu is not None:
        card = find_gpu(gpu)
    elif memory is not None:
        large = [card for card in GPUS.values() if card.memory >= memory * 0.95] or [GPUS["b200"]]
        card = min(large, key=lambda card: card.memory)
    else:
        return None
    return card if memory is None else replace(card, memory=memory)


def target_here(config: RunConfig, ranks: int, gpu: str | None, memory_cap: str | None) -> Target:
    """What real runs on this machine have: its GPUs, or its CPUs with a cap on what tensors may take."""
    from ..launch.gpus import visible_gpus

    if config.run.device != "cpu" and visible_gpus():
        return choose_target(config, ranks, ranks, gpu, memory_cap)
    cap = None if memory_cap is None else parse_bytes(memory_cap, "--memory-cap")
    return Target(ranks, None, ranks, cap=cap)


def cap_setting(memory_cap: str | None) -> str | None:
    """A `--memory-cap` as `memory.cap` takes it."""
    return None if memory_cap is None else f"{parse_bytes(memory_cap, '--memory-cap') / 2**10:.0f}KiB"
