"""The order in which a model becomes a sharded, trainable one. This function is the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .activation import checkpoint_activations
from .blocks import find_blocks
from .compilation import compile_blocks
from .config import RunConfig
from .strategies import OptimizerFactory, Strategy
from .weights import Weights


def parallelize(
    config: RunConfig,
    device: torch.device,
    strategy: Strategy,
    make_model: Callable[[], nn.Module],
    make_optimizer: OptimizerFactory,
    weights: Weights,
    block_classes: Sequence[type[nn.Module]] = (),
) -> None:
    """Build, checkpoint activations, compile, shard, then make the optimizer; the result is `strategy.model`."""
    model = weights.build(make_model, strategy.construction())
    model.train()
    blocks = find_blocks(model, block_classes)
    checkpoint_activations(model, blocks, config.activation)
    compile_blocks(model, blocks, config.compile, device)
    strategy.setup(model, blocks, make_optimizer, weights)
