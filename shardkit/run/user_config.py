"""The config that a user names; another tool's file in its place is refused by that tool's name. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from ..config.load import LoadedConfig, Overrides, load_config
from ..foreign.files import foreign_file_error


def load_user_config(path: str | Path | None, overrides: Overrides = ()) -> LoadedConfig:
    """`load_config`, with the tool's name in the error for a file of Accelerate, DeepSpeed or a recipe's tool."""
    return load_config(path, overrides, foreign_file_error)
