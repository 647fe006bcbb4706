"""What a run's model says beyond its tensors: tied names, and the configuration of a transformers model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config.load import load_config
from ...errors import ShardkitError
from ...parallel.weights import parameters_on_meta
from ...tasks.load import load_task


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model, found by building it without memory.

    Attributes:
        ties: other name of a parameter → the name its shards have.
        prefix: of the transformers model inside the task's own module, with its dot; empty if it is the module itself.
        pretrained: that transformers model, for its configuration; `None` for any other model.
        note: why nothing is known; empty if something is.
    """

    ties: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    pretrained: Any = None
    note: str = ""


def config_near(checkpoint: Path) -> Path | None:
    """The `config.yaml` of the run that a checkpoint folder lies in: RUN/checkpoints/step_…."""
    for folder in checkpoint.resolve().parents[:2]:
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    return None


def model_info(checkpoint: Path) -> ModelInfo:
    """Build the run's model on the meta device and look at it; a note where that is not possible."""
    config = config_near(checkpoint)
    if config is None:
        return ModelInfo(note="no config.yaml of a run beside it, so tied names and config.json are left out")
    try:
        task = load_task(load_config(config).config)
        with parameters_on_meta():
            model = task.build_model()
    except ShardkitError as error:
        return ModelInfo(note=f"the model cannot be built, so tied names and config.json are left out: {error.cause}")
    except Exception as error:  # a user's own code
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return ModelInfo(note=f"the model cannot be built, so tied names and config.json are left out: {problem}")
    prefix, pretrained = _pretrained(model)
    return ModelInfo(_ties(model), prefix, pretrained)


def _ties(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    ties = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            ties[name] = first[id(param)]
    return ties


def _pretrained(model: nn.Module) -> tuple[str, Any]:
    """The transformers model that is, or lies in, the task's module; only if every parameter is inside."""
    transformers = sys.modules.get("transformers")  # a model of it cannot exist unless it was imported
    if transformers is None:
        return "", None
    for name, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            prefix = f"{name}." if name else ""
            whole = all(fqn.startswith(prefix) for fqn, _ in model.named_parameters())
            return (prefix, module) if whole else ("", None)
    return "", None


def save_config(info: ModelInfo, folder: Path, dtype: torch.dtype) -> list[Path]:
    """Write `config.json` and the generation settings, which `AutoModel*.from_pretrained(folder)` looks for."""
    model = info.pretrained
    if model is None:
        return []
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if hasattr(config, "use_cache"):
        config.use_cache = True  # off while training
    config.save_pretrained(folder)
    if getattr(model, "can_generate", lambda: False)() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    return sorted(folder.glob("*config.json"))
