"""Activation checkpointing: keep a block's input, recompute the rest in backward (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from .config import ActivationConfig
from .errors import ConfigError


def checkpoint_activations(model: nn.Module, blocks: Sequence[nn.Module], config: ActivationConfig) -> None:
    """Make every block recompute its activations in backward, in place.

    The block's `forward` is replaced rather than the block wrapped, so parameter names stay what they are and an
    engine's hooks stay outside the recomputed region.

    Raises:
        ConfigError: a policy is set but no repeated block was found.
    """
    if config.policy == "none":
        return
    if not blocks:
        classes = sorted({type(m).__name__ for m in model.modules() if any(True for _ in m.children())})
        raise ConfigError(
            f"activation.policy={config.policy}, but {type(model).__name__} has no list of equal blocks",
            f"give the task a block_classes attribute; classes in the model: {', '.join(classes)}",
        )
    for block in blocks:
        forward: Any = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
