"""The order in which a model becomes sharded and trainable; one function holds all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..activation import checkpoint_activations, offload_activations
from ..config.capability import ZERO
from ..config.schema import RunConfig
from ..parallel.batchnorm import prepare_batchnorm
from ..parallel.blocks import compile_blocks, find_blocks
from ..parallel.precision import cast_parameters, convert_to_fp8
from ..parallel.weights import Weights
from .base import OptimizerFactory, Strategy


def parallelize(
    config: RunConfig,
    device: torch.device,
    strategy: Strategy,
    make_model: Callable[[], nn.Module],
    make_optimizer: OptimizerFactory,
    weights: Weights,
    block_classes: Sequence[type[nn.Module]] = (),
    attention_classes: Sequence[type[nn.Module]] = (),
) -> None:
    """Build, set dtypes, checkpoint activations, compile, shard, make the optimizer; the result is `strategy.model`."""
    model = weights.build(
        make_model,
        strategy.construction(),
        cut_up=strategy.name not in ("single", "ddp"),
        later="on meta" if strategy.name in ("fsdp", "hsdp", "zero3") else "unwritten",
    )
    model.train()
    prepare_batchnorm(model, config, device)
    cast_parameters(model, config.precision, weights.unwritten)
    convert_to_fp8(model, config.precision)
    blocks = find_blocks(model, block_classes)
    checkpoint_activations(model, blocks, config.activation, attention_classes, compiled=config.compile.enabled)
    offload_activations(model, blocks, config.activation, device)
    compile_blocks(model, blocks, config.compile, device, hooks_outside=strategy.name in ZERO)
    strategy.setup(model, blocks, make_optimizer, weights)
