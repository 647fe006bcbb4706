"""Plan, launch, train and account for sharded PyTorch jobs. Importing this module does not import torch."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.2.0"

# public name -> (module, name there)
_PUBLIC = {
    "RunConfig": ("shardkit.config.schema", "RunConfig"),
    "load_config": ("shardkit.config.load", "load_config"),
    "ShardkitError": ("shardkit.errors", "ShardkitError"),
    "ConfigError": ("shardkit.errors", "ConfigError"),
    "Job": ("shardkit.run.job", "Job"),
    "start": ("shardkit.run.job", "start"),
    "watch": ("shardkit.integrations.watching", "watch"),
    "memory_table": ("shardkit.memory.table", "render_table"),
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'shardkit' has no attribute {name!r}")


# Modules that documentation named before they moved → the names that they still give.
_FORMER = {
    "shardkit.config_io": {"load_config": _PUBLIC["load_config"]},
    "shardkit.run.watching": {
        "watch": _PUBLIC["watch"],
        "Watching": ("shardkit.integrations.watching", "Watching"),
    },
    "shardkit.config.foreign": {},
    "shardkit.config.foreign.translate": {"read_job": ("shardkit.foreign.translate", "read_job")},
}


def _former_module(path: str) -> ModuleType:
    """A module that loads each of its names on first use; it answers for these names only, as tools like inspect ask
    every loaded module for arbitrary ones."""

    def load(name: str) -> Any:
        if name in _FORMER[path]:
            module, attribute = _FORMER[path][name]
            return getattr(import_module(module), attribute)
        raise AttributeError(f"module {path!r} has no attribute {name!r}")

    former = ModuleType(path, "Kept for imports from before a move.")
    former.__dict__["__getattr__"] = load
    return former


sys.modules.update({path: _former_module(path) for path in _FORMER})
