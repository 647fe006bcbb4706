"""The settings an automatic plan may change: engine and offload, activation checkpointing, precision, micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ...config.load import as_override
from ...config.schema import ParallelConfig, RunConfig
from ...errors import ConfigError
from ..target import Target

POLICIES = ("none", "selective_op", "selective", "full")
_CPU = "cpu"


@dataclass(frozen=True)
class Combination:
    """A value for every axis except the micro-batch."""

    engine: str  # engine, policy, precision: names to show
    policy: str
    precision: str
    settings: tuple[str, ...]  # overrides as on the command line


def combinations(config: RunConfig, target: Target, fixed_keys: Collection[str]) -> list[Combination]:
    """All combinations to compare; settings given on the command line stay fixed.

    `fixed_keys`: dotted keys that must not change.
    """
    allowed = []
    axes = engines(config, target), _policies(config), _precisions(config, target)
    for (engine, engine_settings), policy, precision in product(*axes):
        settings = {**engine_settings, "activation.policy": policy, "precision.mode": precision}
        if all(value == _value(config, key) for key, value in settings.items() if key in fixed_keys):
            free = tuple(f"{key}={value}" for key, value in settings.items() if key not in fixed_keys)
            allowed.append(Combination(engine, policy, precision, free))
    return allowed


def one_of_each_engine(all_combinations: Sequence[Combination], config: RunConfig) -> list[Combination]:
    """The combination of each engine that keeps the config's checkpointing, with the fastest precision offered."""
    by_engine: dict[str, Combination] = {}
    for combination in all_combinations:
        if combination.engine not in by_engine or combination.policy == config.activation.policy:
            by_engine[combination.engine] = combination
    return list(by_engine.values())


def engines(config: RunConfig, target: Target) -> Iterator[tuple[str, dict[str, str]]]:
    """(name, settings) of strategies with each kind of offload; the config's own keeps its `parallel` settings."""
    world = target.world_size
    plain: list[tuple[str, dict[str, str]]] = []
    if world == 1:
        plain.append(("single", {}))
    else:
        plain += [("ddp", {}), ("fsdp", {})]
        shards = [n for n in _doublings(target.ranks_per_node, world) if 1 < n < world and world % n == 0]
        plain += [("hsdp", {"dp_shard": str(n)}) for n in shards]
        plain += [("zero1", {}), ("zero2", {}), ("zero3", {})]
    if target.gpu is not None:
        if world > 1:
            plain.append(("fsdp", {"offload_param": _CPU}))
        plain += [("zero2", {"offload_optimizer": _CPU}), ("zero3", {"offload_optimizer": _CPU})]
        plain.append(("zero3", {"offload_optimizer": _CPU, "offload_param": _CPU}))
    parallel = config.parallel
    for strategy, keys in plain:
        settings = {"parallel.strategy": strategy}
        changes = {"offload_optimizer": "none", "offload_param": "none", **keys}
        if strategy != parallel.strategy:
            defaults = ParallelConfig()
            changes = {**_changed_from(parallel, defaults), **changes}
        settings |= {
            f"parallel.{key}": value for key, value in changes.items() if value != as_override(getattr(parallel, key))
        }
        yield _engine_name(strategy, keys), settings


def micro_batches(config: RunConfig, target: Target, fixed_keys: Collection[str]) -> tuple[int, list[int]]:
    """(samples per rank and step, the micro-batch sizes that divide them): the global batch does not change."""
    train = config.train
    if train.global_batch_size is not None:
        samples, remainder = divmod(train.global_batch_size, target.world_size)
        if remainder or not samples:
            raise ConfigError(
                f"train.global_batch_size={train.global_batch_size} is not a whole number of samples for each of "
                f"{target.world_size} ranks",
                f"set a multiple of {target.world_size}",
            )
    else:
        samples = train.micro_batch_size * (train.grad_accum_steps or 1)
    if {"train.micro_batch_size", "train.grad_accum_steps"} & set(fixed_keys):
        return samples, [train.micro_batch_size]
    sizes = [n for n in range(1, samples + 1) if samples % n == 0]
    return samples, sizes


def batch_settings(samples: int, micro_batch: int, target: Target) -> tuple[str, ...]:
    return (
        f"train.micro_batch_size={micro_batch}",
        "train.grad_accum_steps=null",
        f"train.global_batch_size={samples * target.world_size}",
    )


def _policies(config: RunConfig) -> Sequence[str]:
    policy = config.activation.policy
    return POLICIES if policy in POLICIES else (policy, *POLICIES)


def _precisions(config: RunConfig, target: Target) -> Sequence[str]:
    """The config's own precision, and bf16 as an alternative to fp32 if the card supports it."""
    mode = config.precision.mode
    fast = target.gpu is not None and target.gpu.capability >= (8, 0)
    return (mode, "bf16") if fast and mode in ("fp32", "tf32") else (mode,)


def _changed_from(parallel: ParallelConfig, defaults: ParallelConfig) -> dict[str, str]:
    """The settings that put the section back to its defaults."""
    fields = [key for key in ParallelConfig.model_fields if key != "strategy"]
    return {
        key: as_override(getattr(defaults, key)) for key in fields if getattr(parallel, key) != getattr(defaults, key)
    }


def _engine_name(strategy: str, keys: dict[str, str]) -> str:
    if "dp_shard" in keys:
        return f"{strategy} ({keys['dp_shard']} to a shard group)"
    offloaded_parts = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
    offloaded = [offloaded_parts[key] for key in keys]
    return f"{strategy}, {' and '.join(offloaded)} on the CPU" if offloaded else strategy


def _doublings(number: int, limit: int) -> Iterator[int]:
    while number < limit:
        yield number
        number *= 2


def _value(config: RunConfig, key: str) -> str:
    section, name = key.split(".")
    return as_override(getattr(getattr(config, section), name))
