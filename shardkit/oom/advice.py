"""Changes of a config that lower its memory, each with its price. The bytes that one saves come from a plan alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from ..config import capability
from ..config.load import as_override, resolve_batch
from ..config.schema import RunConfig
from ..errors import ConfigError

Change = tuple[dict[str, Any], str]
"""Settings by dotted key, and their cost in words."""
_ON_CPU = "the update runs on the CPU; gradients and parameters cross PCIe in each step"
_STRONGER = {
    "ddp": ("fsdp", "zero2", "zero1"),
    "zero1": ("fsdp", "zero3", "zero2"),
    "zero2": ("fsdp", "zero3"),
    "hsdp": ("fsdp",),
}
_SHARD_COST = {
    "zero1": "the same traffic as ddp",
    "zero2": "the same traffic as ddp; gradients are reduced in every micro-batch",
    "zero3": "parameters are gathered for each forward and backward: 1.5 times ddp's traffic",
    "fsdp": "parameters are gathered for each forward and backward: 1.5 times ddp's traffic",
}


def candidates(
    config: RunConfig,
    world_size: int,
    local_world_size: int,
    device: str,  # "cpu" or "cuda"
    *,
    short_of: str = "device",  # "device" or "host"
    parts: Sequence[str] = ("activations", "state"),  # whose memory to lower, first things first
    packable: tuple[float, float] = (0.0, 0.0),  # shares of values that `model.quantize` packs: linear layers, experts
    planned: bool = True,  # a plan of each change follows; else changes that help only some models are left out
) -> list[tuple[str, str]]:
    """Changes that may lower the memory in question, roughly the cheapest first: (settings, their cost).

    Changes that are set already, or that the capability table refuses, are left out.
    """
    changes: list[Change] = list(_for_host(config, device)) if short_of == "host" else []
    if short_of == "device" or device == "cpu":
        accum = resolve_batch(config, world_size)
        kinds = {"activations": _for_activations(config, accum, planned), "state": _for_state(config, accum, packable)}
        changes += [change for part in parts for change in kinds[part]]
    if device == "cpu":  # device and host are one memory there: moving state between them frees nothing
        changes = [change for change in changes if "cpu" not in change[0].values()]
    return [
        (" ".join(f"{key}={as_override(value)}" for key, value in settings.items()), cost)
        for settings, cost in changes
        if _allowed(config, settings, world_size, local_world_size, device)
    ]


def _for_activations(config: RunConfig, accum: int, planned: bool) -> Iterator[Change]:
    micro = config.train.micro_batch_size
    if planned and config.activation.policy == "none":  # nothing is saved in a model without attention
        yield {"activation.policy": "selective"}, "attention runs twice: a few percent more compute"
    if config.task.factory is None and config.model.loss_chunk_size == 0:
        yield {"model.loss_chunk_size": 1024}, "none to speak of"
    yield {"activation.policy": "full"}, "forward runs twice: about a third more compute"
    # A plan tells whether MLPs can be computed in parts; without one, those of the reference transformer can.
    is_reference = config.task.factory is None and config.task.name == "causal_lm"
    if config.model.mlp_chunks == 1 and (config.task.may_split_sequences if planned else is_reference):
        yield {"model.mlp_chunks": 8}, "each MLP's forward runs once more, an eighth of the positions at a time"
    divisors = [size for size in range(micro // 2, 0, -1) if micro % size == 0]
    for smaller in dict.fromkeys([*divisors[:1], *divisors[-1:]]):  # a plan tells which of them is enough
        settings: dict[str, Any] = {"train.micro_batch_size": smaller}
        if config.train.global_batch_size is None or config.train.grad_accum_steps is not None:
            settings["train.grad_accum_steps"] = accum * (micro // smaller)
        yield settings, f"{micro // smaller} times as many passes for the same samples per step"
    if config.precision.mode in ("fp32", "tf32"):
        rounded = "weights stay fp32" if config.adapter.type == "none" else "the frozen base is rounded to bf16"
        yield {"precision.mode": "bf16"}, f"8 bits of mantissa in forward and backward; {rounded}"
    yield {"activation.offload": "cpu"}, "as much pinned host memory, copied out and back in each micro-batch"


def _for_state(config: RunConfig, accum: int, packable: tuple[float, float]) -> Iterator[Change]:
    parallel = config.parallel
    for strategy in _STRONGER.get(parallel.strategy, ()):
        settings: dict[str, Any] = {"parallel.strategy": strategy}
        if parallel.sharding.replicates:
            sizes = {"parallel.dp_replicate": parallel.dp_replicate, "parallel.dp_shard": parallel.dp_shard}
            settings |= {key: None for key, size in sizes.items() if size is not None}
        yield settings, _SHARD_COST[strategy]
    if parallel.sharding.by_fsdp:
        yield {"parallel.reshard_after_forward": True}, "parameters are gathered again in backward"
        yield {"parallel.no_sync": False}, "gradients are reduced in every micro-batch"
    if parallel.sharding.stage:
        yield {"parallel.offload_optimizer": "cpu"}, _ON_CPU
    elif not parallel.sharding.state:
        yield {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu"}, _ON_CPU
    if parallel.sharding.parameters:
        yield {"parallel.offload_param": "cpu"}, f"parameters cross PCIe in each pass; {_ON_CPU}"
    if any(packable) and config.adapter.type == "lora" and config.model.quantize is None and find_spec("bitsandbytes"):
        packed = {"model.quantize.bits": 4} | ({"model.quantize.experts": True} if packable[1] else {})
        yield packed, "each forward and backward unpacks a layer; the base is rounded to 16 numbers a block"
    in_8_bits = {"torchao": "adamw8bit", "bitsandbytes": "adamw_bnb_8bit"}
    if config.optim.name == "adamw":
        names = [name for library, name in in_8_bits.items() if find_spec(library) is not None]
        yield from (({"optim.name": name}, "moments in 8 bits") for name in names[:1])
    if config.train.max_norm is None and accum == 1:
        yield {"optim.in_backward": True}, "no clipping, no accumulation"
    if config.train.ema_decay is not None:
        yield {"train.ema_decay": None}, "evaluation uses the last weights"


def _for_host(config: RunConfig, device: str) -> Iterator[Change]:
    if config.data.workers:
        yield {"data.workers": config.data.workers // 2}, "fewer processes load data"
    yield {"checkpoint.async_save": False}, "training waits for saves"
    if device == "cuda":  # without a GPU all of it is host memory anyway
        for key in ("parallel.offload_param", "parallel.offload_optimizer", "activation.offload"):
            yield {key: "none"}, "as much memory of the GPU"


def _allowed(config: RunConfig, settings: Mapping[str, Any], world: int, local_world: int, device: str) -> bool:
    """Whether the changed configuration differs, is valid, and works on these ranks."""
    changed = config.model_dump()
    for key, value in settings.items():
        section, name, *inner = key.split(".")
        changed[section][name] = {**(changed[section][name] or {}), inner[0]: value} if inner else value
    try:
        new = RunConfig.model_validate(changed)
        capability.check(new, device=device, world_size=world, local_world_size=local_world)
        resolve_batch(new, world)
    except (ConfigError, ValidationError):
        return False
    return new != config
