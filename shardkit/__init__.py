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


# Modules that moved: the old name of the module → (the name in it, its module now). One name of each stays importable,
# and lazily: inspect and other tools ask every loaded module for arbitrary names.
_MOVED = {
    "shardkit.config_io": ("load_config", "shardkit.config.load"),
    "shardkit.config.foreign.translate": ("read_job", "shardkit.foreign.translate"),
}


def _add_moved(old_name: str, public_name: str, module: str) -> None:
    def get(name: str) -> Any:
        if name == public_name:
            return getattr(import_module(module), name)
        raise AttributeError(f"module {old_name!r} has no attribute {name!r}")

    moved = ModuleType(old_name, f"Now `{module}.{public_name}`.")
    moved.__dict__["__getattr__"] = get
    sys.modules[old_name] = moved


for _old_name, (_public_name, _module) in _MOVED.items():
    _add_moved(_old_name, _public_name, _module)
sys.modules["shardkit.config.foreign"] = ModuleType("shardkit.config.foreign", "Now `shardkit.foreign`.")
