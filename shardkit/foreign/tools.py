"""The tools whose files are read: their names, tables, defaults and versions, and which of them run in the Trainer."""

from __future__ import annotations

from collections.abc import Container

from . import tables
from .axolotl import AXOLOTL, AXOLOTL_DEFAULTS, AXOLOTL_MARKS
from .llamafactory import LLAMAFACTORY, LLAMAFACTORY_DEFAULTS, LLAMAFACTORY_MARKS
from .tables import Key, Settings
from .trl import TRL, TRL_DEFAULTS, TRL_MARKS

NAMES = {
    "accelerate": "Accelerate", "deepspeed": "DeepSpeed", "trainer": "transformers' Trainer", "model": "a model",
    "peft": "peft", "axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL",
}  # fmt: skip
"""Each tool's name in messages."""
VERSIONS = {
    "accelerate": "1.15", "deepspeed": "0.19", "trainer": "5.23", "peft": "0.21", "axolotl": "0.18",
    "llamafactory": "0.9.6", "trl": "1.9",
}  # fmt: skip
"""The versions whose keys the tables hold; the Trainer's is that of transformers."""
RECIPES = ("trl", "llamafactory", "axolotl")
"""Tools whose one file describes model, adapter and the Trainer's arguments, and whose loop is the Trainer's."""
KEYS: dict[str, dict[str, Key]] = {
    "accelerate": tables.ACCELERATE, "deepspeed": tables.DEEPSPEED, "trainer": tables.TRAINER, "peft": tables.PEFT,
    "trl": TRL, "llamafactory": LLAMAFACTORY, "axolotl": AXOLOTL,
}  # fmt: skip
TRAINER_DEFAULTS: dict[str, Settings] = {
    "trainer": tables.TRAINER_DEFAULTS, "trl": TRL_DEFAULTS, "llamafactory": LLAMAFACTORY_DEFAULTS,
    "axolotl": AXOLOTL_DEFAULTS,
}  # fmt: skip
"""Defaults of the tools whose loop is the Trainer's."""
RENAMED = {
    **tables.RENAMED,
    "trl": {"lora_rank": "lora_r"},
    "llamafactory": {"lora_r": "lora_rank", "lora_target_modules": "lora_target", "max_seq_length": "cutoff_len"},
    "axolotl": {
        "per_device_train_batch_size": "micro_batch_size",
        "max_seq_length": "sequence_len",
        "num_train_epochs": "num_epochs",
        "lora_rank": "lora_r",
        "adam_eps": "adam_epsilon",
        **{f"tokens.{name}": f"special_tokens.{name}" for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
        "optim": "optimizer",
        "lr_scheduler_type": "lr_scheduler",
    },
}
"""Names of earlier versions, or of a neighbour's file → the names to write instead."""
ALIASES = {
    "axolotl": {
        "optim": "optimizer",
        "lr_scheduler_type": "lr_scheduler",
        "per_device_train_batch_size": "micro_batch_size",
    },
}
"""The Trainer's arguments → the names of a recipe's keys, where they differ."""


def base(tool: str) -> str:
    """The tool whose part in a job a file has: the Trainer for recipes."""
    return "trainer" if tool in RECIPES else tool


def find(tool: str, key: str) -> Key | None:
    """The table's entry for a dotted key; `None` if their tool has no such key."""
    table = KEYS[tool]
    parts = key.split(".")
    sections = [".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1)]
    return next((table[name] for name in (key, *sections) if name in table), None)


def recipe(keys: Container[str]) -> str:
    """The tool whose recipe has the keys at its top; empty if no recipe does."""
    if "base_model" in keys and any(mark in keys for mark in AXOLOTL_MARKS):
        return "axolotl"
    if any(mark in keys for mark in LLAMAFACTORY_MARKS):
        return "llamafactory"
    return "trl" if any(mark in keys for mark in TRL_MARKS) else ""
