"""Ways to spread a model over ranks: one file per engine, no inheritance between them; `states` is shared."""

from __future__ import annotations

from ..config.schema import RunConfig
from ..parallel.world import World
from .base import OptimizerFactory, Shard, Strategy
from .ema import EMA

__all__ = ["OptimizerFactory", "Shard", "Strategy", "make_strategy"]


def make_strategy(config: RunConfig, world: World) -> Strategy:
    """The config's strategy, not yet set up; imports only the module of its engine."""
    engine = _engine(config, world)
    return engine if config.train.ema_decay is None else EMA(engine, config.train.ema_decay)


def _engine(config: RunConfig, world: World) -> Strategy:
    name = config.parallel.strategy
    if name == "single":
        from .single import Single

        return Single(config, world)
    if name == "ddp":
        from .ddp import DDP

        return DDP(config, world)
    if name in ("fsdp", "hsdp"):
        from .fsdp import FSDP

        return FSDP(config, world)
    from .zero.engine import ZeRO

    return ZeRO(config, world)
