"""Look at the model's folder before anything is built: whether it has weights, and a tokenizer for the data."""

from __future__ import annotations

from pathlib import Path

from ...config.schema import RunConfig
from ...errors import ConfigError
from ..rows.formats import RECORDS_ALONE
from .tokenizer import tokenizer_path

_WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "global_step*",
    ".metadata", "manifest.json", "checkpoints", "step_*",
)  # fmt: skip
"""Patterns of what may hold weights."""


def check_model_folder(config: RunConfig) -> None:
    """Refuse a folder of `model.init_from` that lacks its weights, or the tokenizer that the data need.

    Folders without a config.json, such as run directories, are judged when they are read.

    Raises:
        ConfigError: names the missing file and the folder.
    """
    if config.model.init_from is None:
        return
    folder = Path(config.model.init_from).expanduser()
    if not (folder / "config.json").is_file():
        return
    starts_with_it = config.run.resume is False or config.adapter.type != "none"
    if starts_with_it and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ConfigError(
            f"model.init_from={config.model.init_from}: no *.safetensors in {folder}, only the model's description",
            "copy the model's weights there; or set model.hf_config to that folder, to start from random weights",
        )
    _check_tokenizer(config, folder)


def _check_tokenizer(config: RunConfig, folder: Path) -> None:
    if config.task.factory is not None or config.task.name not in ("hf_causal_lm", "hf_masked_lm"):
        return
    if tokenizer_path(config) is not None:
        return
    paths = [path for path in (config.data.path, *(source.path for source in config.data.sources)) if path is not None]
    records = next((path for path in paths if path.lower().endswith(RECORDS_ALONE)), None)
    if records is None:
        return
    raise ConfigError(
        f"no tokenizer.json in {folder}, and {records} needs a tokenizer",
        "copy the model's tokenizer there, or set data.tokenizer to a tokenizer.json or to a folder that holds one",
    )
