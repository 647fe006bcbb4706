"""The engine of a config, and the order in which a model becomes sharded and trainable by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import nn

from ..activation import checkpoint_activations, offload_activations
from ..config.schema import RunConfig
from ..config.strategy import StrategyName
from ..errors import ConfigError
from ..parallel.batchnorm import prepare_batchnorm
from ..parallel.blocks import compile_blocks, find_blocks
from ..parallel.compat import is_persistent
from ..parallel.precision import cast_parameters, convert_to_fp8
from ..parallel.weights import Weights, refuse_uninitialised
from ..parallel.world import World
from .base import OptimizerFactory, Strategy
from .ema import EMA


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
        lambda: refuse_parameters(make_model(), strategy), strategy.construction(), strategy.facts.shards_state
    )
    make_contiguous(model, strategy)
    model.train()
    prepare_batchnorm(model, config, device)
    cast_parameters(model, config.precision)
    convert_to_fp8(model, config.precision)
    blocks = find_blocks(model, block_classes)
    checkpoint_activations(model, blocks, config.activation, attention_classes, compiled=config.compile.enabled)
    offload_activations(model, blocks, config.activation, device)
    compile_blocks(model, blocks, config.compile, device, hooks_outside=strategy.facts.hooks_modules)
    strategy.setup(model, blocks, make_optimizer, weights)


def refuse_parameters(model: nn.Module, strategy: Strategy) -> nn.Module:
    """Return the model if the engine can hold each of its parameters."""
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            fqn = f"{prefix}.{name}".lstrip(".")
            refuse_uninitialised(module, fqn, param)
            if param.requires_grad and name == "weight" and getattr(module, "sparse", None) is True:
                raise ConfigError(
                    f"{fqn} is an {type(module).__name__} with sparse=True: its gradients are sparse tensors, which "
                    "shardkit can neither reduce nor clip",
                    f"build {prefix or 'the model'} with sparse=False",
                )
            if param.is_complex() and strategy.facts.shards_state:
                dtype = str(param.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"{fqn} is {dtype}, and parallel.strategy={strategy.name} cannot shard complex parameters",
                    "hold it as real numbers (torch.view_as_real) and view it as complex in forward, or set "
                    "parallel.strategy=ddp",
                )
            if any(stride == 0 < size - 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
                raise ConfigError(
                    f"{fqn} is expanded: its {param.numel()} elements share memory, which no optimizer updates",
                    "register what is expanded as the parameter, and expand it in forward",
                )
    return model


def make_contiguous(model: nn.Module, strategy: Strategy) -> None:
    """Lay out parameters and saved buffers in memory in the order of their elements, as engines and checkpoints do."""
    plain = {fqn: param for fqn, param in model.named_parameters() if not hasattr(param, "ds_id")}
    addresses = Counter(param.untyped_storage().data_ptr() for param in plain.values() if not param.is_meta)
    for fqn, param in plain.items():
        if param.is_contiguous():
            continue
        if not param.is_meta and addresses[param.untyped_storage().data_ptr()] > 1:
            if not strategy.facts.shards_state:
                continue
            raise ConfigError(
                f"{fqn} is a view of another parameter's memory, and parallel.strategy={strategy.name} holds each "
                "apart",
                "tie the modules to one parameter, or set parallel.strategy=ddp",
            )
        param.data = param.data.contiguous()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_contiguous() and is_persistent(module, name):
                buffer.data = buffer.data.contiguous()


def slower_than_single(config: RunConfig, world_size: int) -> str:
    """A hint for one process under an engine that shards: `single` is faster; empty where it is not the same."""
    parallel = config.parallel
    offloads = parallel.offload_optimizer != "none" or parallel.offload_param != "none"
    if world_size > 1 or offloads or not parallel.sharding.parameters:
        return ""
    return f"hint: {parallel.strategy} has nothing to shard on one process: parallel.strategy=single is faster"


EngineFactory = Callable[[RunConfig, World], Strategy]
"""Makes the engine of a config's strategy on a rank."""


def make_strategy(config: RunConfig, world: World, make_engine: EngineFactory | None = None) -> Strategy:
    """The config's strategy, not yet set up; imports only the module of its engine.

    `make_engine`: makes another engine than training's; planning has engines that work on fake tensors.
    """
    engine = (make_engine or _engine)(config, world)
    return engine if config.train.ema_decay is None else EMA(engine, config.train.ema_decay)


def _engine(config: RunConfig, world: World) -> Strategy:
    module, name = _ENGINES[config.parallel.strategy]
    engine: Strategy = getattr(import_module(f".{module}", __package__), name)(config, world)
    return engine


_ENGINES: dict[StrategyName, tuple[str, str]] = {
    "single": ("single", "Single"), "ddp": ("ddp", "DDP"), "fsdp": ("fsdp", "FSDP"), "hsdp": ("fsdp", "FSDP"),
    "zero1": ("zero.engine", "ZeRO"), "zero2": ("zero.engine", "ZeRO"), "zero3": ("zero.engine", "ZeRO"),
}  # fmt: skip
"""Name → the module and the class of the engine."""
