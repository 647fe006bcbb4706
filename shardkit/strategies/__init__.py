"""Ways to spread a model over ranks, one file per engine; `states` has what engines on torch's optimizers inherit."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ..config.schema import RunConfig
from ..config.strategy import StrategyName
from ..parallel.world import World
from .base import OptimizerFactory, Shard, Strategy
from .ema import EMA

__all__ = ["EngineFactory", "OptimizerFactory", "Shard", "Strategy", "make_strategy"]


def slower_than_single(config: RunConfig, world_size: int) -> str:
    """A hint for one process under an engine that shards: `single` is faster; empty where it is not the same."""
    parallel = config.parallel
    offloads = parallel.offload_optimizer != "none" or parallel.offload_param != "none"
    if world_size > 1 or offloads or not parallel.sharding.parameters:
        return ""
    return f"hint: {parallel.strategy} has nothing to shard on one process: parallel.strategy=single is faster"


EngineFactory = Callable[[RunConfig, World], Strategy]
"""Makes the engine of a config's strategy on a rank."""


def make_strategy(config: RunConfig, world: World, make_engine: EngineFactory | None = None) -> Strategy:
    """The config's strategy, not yet set up; imports only the module of its engine.

    `make_engine`: makes another engine than training's; planning has engines that work on fake tensors.
    """
    engine = (make_engine or _engine)(config, world)
    return engine if config.train.ema_decay is None else EMA(engine, config.train.ema_decay)


def _engine(config: RunConfig, world: World) -> Strategy:
    module, name = _ENGINES[config.parallel.strategy]
    engine: Strategy = getattr(import_module(f".{module}", __name__), name)(config, world)
    return engine


_ENGINES: dict[StrategyName, tuple[str, str]] = {
    "single": ("single", "Single"), "ddp": ("ddp", "DDP"), "fsdp": ("fsdp", "FSDP"), "hsdp": ("fsdp", "FSDP"),
    "zero1": ("zero.engine", "ZeRO"), "zero2": ("zero.engine", "ZeRO"), "zero3": ("zero.engine", "ZeRO"),
}  # fmt: skip
"""Name → the module and the class of the engine."""
