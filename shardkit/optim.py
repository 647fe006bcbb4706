"""Optimizers, their parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .config import OptimConfig
from .errors import ConfigError


def make_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD over the model's trainable parameters; every hyperparameter is passed explicitly.

    Raises:
        ConfigError: the model has no trainable parameter.
    """
    groups = parameter_groups(config, model)
    if not groups:
        raise ConfigError(
            f"{type(model).__name__} has no trainable parameter", "set requires_grad on what is to be trained"
        )
    kernel = _kernel(config, groups[0]["params"][0])
    if config.name == "adamw":
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, **kernel
        )
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, **kernel)


def _kernel(config: OptimConfig, param: torch.Tensor) -> dict[str, Any]:
    """The optimizer's `fused` and `foreach` arguments; `None` leaves the choice to torch."""
    # torch registers no sharding rule for the fused SGD kernel on DTensors (importing that class takes 0.4 s).
    has_fused = config.name == "adamw" or not hasattr(param, "placements")
    if config.implementation == "auto":
        return {"fused": True if has_fused else None, "foreach": None}
    if config.implementation == "fused" and not has_fused:
        raise ConfigError(
            "optim.implementation=fused, but torch has no fused sgd for FSDP2's shards", "set optim.implementation=auto"
        )
    return {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}


def parameter_groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """A group with weight decay and one without (norms, biases, embeddings), in model order; empty ones left out."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        spared = isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower()
        for name, param in module.named_parameters(recurse=False):
            if id(param) in seen or not param.requires_grad:
                continue
            seen.add(id(param))
            no_decay = (spared or name.endswith("bias")) and not config.decay_norm_bias_embed
            (plain if no_decay else decayed).append(param)
    groups: list[dict[str, Any]] = []
    if decayed:
        groups.append({"params": decayed, "weight_decay": config.weight_decay})
    if plain:
        groups.append(
            {"params": plain, "weight_decay": 0.0 if not config.decay_norm_bias_embed else config.weight_decay}
        )
    return groups


def lr_at(config: OptimConfig, step: int, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (1-based): linear warm-up, then the schedule down to lr·min_lr_ratio."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps - 1) / span)
    floor = config.min_lr_ratio
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (floor + (1 - floor) * shape)
