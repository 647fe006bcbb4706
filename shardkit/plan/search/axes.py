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
_OFFLOADED = {"offload_optimizer": "optimizer", "offload_param": "parameters"}


@dataclass(frozen=True)
class Combination:
    """A value for every axis except the micro-batch."""

    engine: str  # engine, policy, precision: names to show
    policy: str
    precision: str
    settings: tuple[str, ...]  # overrides as on the command line


def combinations(config: RunConfig, target: Target, fixed_keys: Collection[str]) -> list[Combination]:
    """All combinations to compare; settings of `fixed_keys` (dotted, given on the command line) stay as they are."""
    allowed = []
    own_policy, mode = config.activation.policy, config.precision.mode
    policies: tuple[str, ...] = POLICIES if own_policy in POLICIES else (own_policy, *POLICIES)
    # bf16 is an alternative to fp32 if the card supports it.
    is_fast = target.gpu is not None and target.gpu.capability >= (8, 0)
    precisions = (mode, "bf16") if is_fast and mode in ("fp32", "tf32") else (mode,)
    axes = engines(config, target), policies, precisions
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
    plain: list[tuple[str, dict[str, str]]] = [("single", {})]
    if world > 1:
        doublings = (target.ranks_per_node * 2**n for n in range(world.bit_length()))
        shards = [n for n in doublings if 1 < n < world and world % n == 0]
        plain = [("ddp", {}), ("fsdp", {}), *(("hsdp", {"dp_shard": str(n)}) for n in shards)]
        plain += [("zero1", {}), ("zero2", {}), ("zero3", {})]
    if target.gpu is not None:
        plain += [("fsdp", {"offload_param": "cpu"})] if world > 1 else []
        plain += [("zero2", {"offload_optimizer": "cpu"}), ("zero3", {"offload_optimizer": "cpu"})]
        plain.append(("zero3", {"offload_optimizer": "cpu", "offload_param": "cpu"}))
    parallel = config.parallel
    for strategy, keys in plain:
        settings = {"parallel.strategy": strategy}
        changes = {"offload_optimizer": "none", "offload_param": "none", **keys}
        if strategy != parallel.strategy:  # another engine starts from the section's defaults
            defaults = ParallelConfig().model_dump(exclude={"strategy"})
            others = {key: as_override(value) for key, value in defaults.items() if value != getattr(parallel, key)}
            changes = {**others, **changes}
        settings |= {
            f"parallel.{key}": value for key, value in changes.items() if value != as_override(getattr(parallel, key))
        }
        offloaded = [part for key, part in _OFFLOADED.items() if key in keys]
        name = f"{strategy}, {' and '.join(offloaded)} on the CPU" if offloaded else strategy
        yield f"{strategy} ({keys['dp_shard']} to a shard group)" if "dp_shard" in keys else name, settings


def micro_batches(config: RunConfig, target: Target, fixed_keys: Collection[str]) -> tuple[int, list[int]]:
    """(samples per rank and step, the micro-batch sizes that divide them): the global batch does not change."""
    train = config.train
    if train.global_batch_size is not None:
        samples, remainder = divmod(train.global_batch_size, target.world_size)
        if remainder or not samples:
            cause = f"train.global_batch_size={train.global_batch_size} is no multiple of {target.world_size} ranks"
            raise ConfigError(cause, f"set a multiple of {target.world_size}")
    else:
        samples = train.micro_batch_size * (train.grad_accum_steps or 1)
    if {"train.micro_batch_size", "train.grad_accum_steps"} & set(fixed_keys):
        return samples, [train.micro_batch_size]
    return samples, [n for n in range(1, samples + 1) if samples % n == 0]


def batch_settings(samples: int, micro_batch: int, target: Target) -> tuple[str, ...]:
    return (
        f"train.micro_batch_size={micro_batch}",
        "train.grad_accum_steps=null",
        f"train.global_batch_size={samples * target.world_size}",
    )


def _value(config: RunConfig, key: str) -> str:
    section, name = key.split(".")
    return as_override(getattr(getattr(config, section), name))
