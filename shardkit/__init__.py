"""Plan, launch, train and account for sharded PyTorch jobs. Importing this module does not import torch."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# public name -> (module, name there)
_PUBLIC = {
    "RunConfig": ("shardkit.config.schema", "RunConfig"),
    "load_config": ("shardkit.config.load", "load_config"),
    "ShardkitError": ("shardkit.errors", "ShardkitError"),
    "ConfigError": ("shardkit.errors", "ConfigError"),
    "Job": ("shardkit.run.job", "Job"),
    "start": ("shardkit.run.job", "start"),
    "watch": ("shardkit.run.watching", "watch"),
    "memory_table": ("shardkit.memory.table", "render_table"),
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'shardkit' has no attribute {name!r}")


# Keeps `from shardkit.config_io import load_config` working, the import from before `config` was a package. Only this
# one name is lazy: inspect and other tools ask every loaded module for arbitrary names.
_config_io = ModuleType("shardkit.config_io", "Now `shardkit.load_config`.")
_config_io.__dict__["__getattr__"] = lambda name: __getattr__(name if name == "load_config" else f"config_io.{name}")
sys.modules[_config_io.__name__] = _config_io
