"""The settings an automatic plan may change: engine and offload, activation checkpointing, precision, micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ...config.schema import ParallelConfig, RunConfig
from ...errors import ConfigError
from ..target import Target

POLICIES = ("none", "selective_op", "selective", "full")
_CPU = "cpu"


@dataclass(frozen=True)
class Combination:
    """A value for every axis except the micro-batch.

    Attributes:
        engine, policy, precision: names to show.
        settings: overrides as on the command line.
    """

    engine: str
    policy: str
    precision: str
    settings: tuple[str, ...]


def combinations(config: RunConfig, target: Target, given: Collection[str]) -> list[Combination]:
    """All combinations to compare; settings given on the command line stay fixed.

    Args:
        given: dotted keys that must not change.
    """
    found = []
    for engine, policy, precision in product(engines(config, target), _policies(config), _precisions(config, target)):
        settings = {**engine.settings, "activation.policy": policy, "precision.mode": precision}
        if all(value == _value(config, key) for key, value in settings.items() if key in given):
            free = tuple(f"{key}={value}" for key, value in settings.items() if key not in given)
            found.append(Combination(engine.name, policy, precision, free))
    return found


def one_of_each_engine(every: Sequence[Combination], config: RunConfig) -> list[Combination]:
    """The combination of each engine that keeps the config's checkpointing, with the fastest precision offered."""
    found: dict[str, Combination] = {}
    for combination in every:
        if combination.engine not in found or combination.policy == config.activation.policy:
            found[combination.engine] = combination
    return list(found.values())


@dataclass(frozen=True)
class Engine:
    name: str
    settings: dict[str, str]


def engines(config: RunConfig, target: Target) -> Iterator[Engine]:
    """Strategies with each kind of offload; the config's own strategy keeps its other `parallel` settings."""
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
    own = config.parallel
    for strategy, keys in plain:
        settings = {"parallel.strategy": strategy}
        wanted = {"offload_optimizer": "none", "offload_param": "none", **keys}
        if strategy != own.strategy:
            defaults = ParallelConfig()
            wanted = {**_changed_from(own, defaults), **wanted}
        settings |= {f"parallel.{key}": value for key, value in wanted.items() if value != _text(getattr(own, key))}
        yield Engine(_engine_name(strategy, keys), settings)


def micro_batches(config: RunConfig, target: Target, given: Collection[str]) -> tuple[int, list[int]]:
    """(samples per rank and step, the micro-batch sizes that divide them): the global batch does not change.

    Raises:
        ConfigError: the global batch cannot be cut into whole samples per rank.
    """
    train = config.train
    if train.global_batch_size is not None:
        samples, left = divmod(train.global_batch_size, target.world_size)
        if left or not samples:
            raise ConfigError(
                f"train.global_batch_size={train.global_batch_size} is not a whole number of samples for each of "
                f"{target.world_size} ranks",
                f"set a multiple of {target.world_size}",
            )
    else:
        samples = train.micro_batch_size * (train.grad_accum_steps or 1)
    if {"train.micro_batch_size", "train.grad_accum_steps"} & set(given):
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
    own = config.activation.policy
    return POLICIES if own in POLICIES else (own, *POLICIES)


def _precisions(config: RunConfig, target: Target) -> Sequence[str]:
    """The config's own precision, and bf16 as an alternative to fp32 if the card supports it."""
    own = config.precision.mode
    fast = target.gpu is not None and target.gpu.capability >= (8, 0)
    return (own, "bf16") if fast and own in ("fp32", "tf32") else (own,)


def _changed_from(own: ParallelConfig, defaults: ParallelConfig) -> dict[str, str]:
    """The settings that put the section back to its defaults."""
    fields = [key for key in ParallelConfig.model_fields if key != "strategy"]
    return {key: _text(getattr(defaults, key)) for key in fields if getattr(own, key) != getattr(defaults, key)}


def _engine_name(strategy: str, keys: dict[str, str]) -> str:
    if "dp_shard" in keys:
        return f"{strategy} ({keys['dp_shard']} to a shard group)"
    what = {"offload_optimizer": "optimizer", "offload_param": "parameters"}
    offloaded = [what[key] for key in keys]
    return f"{strategy}, {' and '.join(offloaded)} on the CPU" if offloaded else strategy


def _doublings(first: int, limit: int) -> Iterator[int]:
    while first < limit:
        yield first
        first *= 2


def _value(config: RunConfig, key: str) -> str:
    section, name = key.split(".")
    return _text(getattr(getattr(config, section), name))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
