"""The ranks and the hardware that a job is planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from ..config.schema import RunConfig
from ..errors import ConfigError
from ..hardware import calibration
from ..hardware.cards import DEFAULT, GPUS, Gpu, find_gpu, parse_bytes


@dataclass(frozen=True)
class Target:
    """The ranks of a job and the memory of each."""

    world_size: int
    gpu: Gpu | None  # the card; `None` = a run on CPUs
    ranks_per_node: int  # ranks on one machine
    rank: int | None = None  # the rank to plan; `None`: the one that takes the most
    expandable: bool = True  # whether the allocator's segments can grow, shardkit's default
    host_memory: int | None = None  # bytes of host memory per rank; `None` = not asked
    cap: int | None = None  # bytes that a rank may use for tensors on CPUs
    card_is_assumed: bool = False  # whether nobody named the card

    @property
    def device_memory(self) -> int | None:
        return self.cap if self.gpu is None else self.gpu.memory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Target:
        return TypeAdapter(cls).validate_python(obj)


def choose_target(
    config: RunConfig,
    gpus: int = 1,
    gpus_per_node: int = 8,
    gpu: str | None = None,  # default: the smallest with `gpu_memory` and flash attention, else h100
    gpu_memory: str | None = None,  # memory of each card; overrides the table's
    host_memory: str | None = None,  # memory of each machine; on CPUs each rank's share is its cap
    memory_cap: str | None = None,  # limit of each rank; overrides the others
    expandable: bool = True,  # whether the allocator's segments can grow
) -> Target:
    """The target that the command's options describe."""
    for name, number in (("--gpus", gpus), ("--gpus-per-node", gpus_per_node)):
        if number < 1:
            raise ConfigError(f"{name} {number} is not a number of GPUs", "ask for 1 or more")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        fewer = gpus // gpus_per_node * gpus_per_node
        cause = f"--gpus {gpus} is not a whole number of machines with --gpus-per-node {gpus_per_node}"
        raise ConfigError(
            cause, f"say how many a machine has: --gpus-per-node; or ask for {fewer} or {fewer + gpus_per_node} GPUs"
        )
    per_node = min(gpus, gpus_per_node)
    on_host = None if host_memory is None else parse_bytes(host_memory, "--host-memory") // per_node
    cap = None if memory_cap is None else parse_bytes(memory_cap, "--memory-cap")
    card = _card(gpu, None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory"))
    if card is None and config.run.device == "cpu":
        caps = [n_bytes for n_bytes in (cap, on_host) if n_bytes is not None]  # on CPUs the host is the device
        return Target(gpus, None, per_node, cap=min(caps, default=None))
    if card is None:
        card = GPUS[DEFAULT] if cap is None else _card(None, cap)
    elif cap is not None:
        card = replace(card, memory=cap)
    card = card and known_here(card, gpus)
    return Target(gpus, card, per_node, expandable=expandable, host_memory=on_host, card_is_assumed=gpu is None)


def known_here(gpu: Gpu, world_size: int) -> Gpu:
    """The card with its overheads as a calibration of this machine measured them, else typical ones."""
    constants = calibration.find(gpu.device_name, world_size) or {}
    measured = {"context": constants.get("context_bytes"), "per_communicator": constants.get("communicator_bytes")}
    overheads: dict[str, Any] = {key: round(n_bytes) for key, n_bytes in measured.items() if n_bytes is not None}
    return replace(gpu, **overheads, overhead_from="measured here by shardkit doctor") if overheads else gpu


def _card(gpu: str | None, memory: int | None) -> Gpu | None:
    if gpu is not None:
        card = find_gpu(gpu)
    elif memory is not None:
        usual = [card for card in GPUS.values() if card.capability >= (8, 0)]  # older ones have other kernels
        large = [card for card in usual if card.memory >= memory * 0.95] or [GPUS["b200"]]
        card = min(large, key=lambda card: card.memory)
    else:
        return None
    return card if memory is None else replace(card, memory=memory)


def target_here(config: RunConfig, ranks: int, gpu: str | None, memory_cap: str | None) -> Target:
    """The target of real runs on this machine: its GPUs, or its CPUs with a cap on the memory of tensors."""
    from ..launch.ranks.env import model_names, visible_gpus

    if config.run.device != "cpu" and visible_gpus():
        names = model_names()
        card_here = next((gpu_entry.name for gpu_entry in GPUS.values() if gpu_entry.device_name in names), None)
        if gpu is None and card_here is None and memory_cap is None:
            name = names[0] if names else "whose name the driver does not say"
            fix = "pass the most similar card as --gpu, or the memory to use as --memory-cap"
            raise ConfigError(f"this machine's card ({name}) is not one that planning knows", fix)
        return choose_target(config, ranks, ranks, gpu or card_here, memory_cap=memory_cap)
    cap = None if memory_cap is None else parse_bytes(memory_cap, "--memory-cap")
    return Target(ranks, None, ranks, cap=cap)


def cap_setting(memory_cap: str | None) -> str | None:
    """A `--memory-cap` in the form that `memory.cap` takes."""
    return None if memory_cap is None else f"{parse_bytes(memory_cap, '--memory-cap') / 2**10:.0f}KiB"
