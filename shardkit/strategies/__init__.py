"""Ways to spread a model over ranks, one file per engine; `states` has what engines on torch's optimizers inherit."""

from __future__ import annotations

from .base import OptimizerFactory, Shard, Strategy

__all__ = ["OptimizerFactory", "Shard", "Strategy"]
