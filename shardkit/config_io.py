"""`load_config` where it was before; new code takes it from `shardkit`."""

from __future__ import annotations

from .config.load import LoadedConfig, load_config

__all__ = ["LoadedConfig", "load_config"]
