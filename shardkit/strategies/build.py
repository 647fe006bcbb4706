"""The engine of a config, and the order in which a model becomes sharded and trainable by it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..activation import checkpoint_activations, offload_activations
from ..activation.tiles import tile_mlps
from ..config.load import resolve_batch
from ..config.schema import RunConfig, StrategyName
from ..errors import ConfigError
from ..parallel.blocks import compile_blocks, find_blocks
from ..parallel.compat import is_persistent
from ..parallel.context import BATCH_NORMS, split_sequences
from ..parallel.mesh import dimensions
from ..parallel.precision import cast_parameters, convert_to_fp8, route_in_fp32
from ..parallel.weights import Weights, refuse_uninitialised
from ..parallel.world import World
from .base import OptimizerFactory, Strategy
from .ema import EMA


def parallelize(
    config: RunConfig,
    world: World,
    strategy: Strategy,
    make_model: Callable[[], nn.Module],
    make_optimizer: OptimizerFactory,
    weights: Weights,
    block_classes: Sequence[type[nn.Module]] = (),
    attention_classes: Sequence[type[nn.Module]] = (),
) -> None:
    """Build, set dtypes, split layers, experts and sequences, tile, checkpoint, compile, shard, draw the weights,
    make the optimizer: `strategy.model`."""
    device = world.device
    model = weights.build(
        lambda: refuse_parameters(make_model(), strategy), strategy.construction(), strategy.facts.shards_state
    )
    make_contiguous(model, strategy)
    cast_parameters(model, config.precision)  # before layers are split: a DTensor's `data` keeps its type
    if world.mesh is not None:
        from ..parallel.tensor import split_layers  # DTensor's class takes 0.4 s to import

        split_layers(model, dimensions(world.mesh, 2), config.parallel)
    model.train()
    prepare_batchnorm(model, config, device)
    convert_to_fp8(model, config.precision)
    route_in_fp32(model, config.precision, device)
    if world.experts is not None:
        from ..parallel.experts import split_experts  # DTensor takes 0.4 s to import

        split_experts(model, world.experts)
    if world.context is not None:
        split_sequences(model, world.context)
    blocks = find_blocks(model, block_classes)
    if config.model.mlp_chunks > 1:
        tile_mlps(model, blocks, config.model.mlp_chunks)
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


logger = logging.getLogger(__name__)

# Batch normalisation with the statistics of all ranks' micro-batches, on the CPU too.


class CPUSyncBatchNorm(nn.BatchNorm1d):
    """`nn.SyncBatchNorm` for the CPU, as torch's needs a GPU. Ranks exchange sums, so their batch sizes may differ."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            # The running statistics, or, if there are none, this batch's, as torch does.
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias,
                training=self.running_mean is None and self.running_var is None, eps=self.eps,
            )  # fmt: skip
        dims = [d for d in range(input.dim()) if d != 1]
        wide = input.float()
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = wide.new_full((1,), input.numel() / input.shape[1])
        total = _sum_over_ranks(torch.cat([wide.sum(dims), count]))
        n = total[-1].detach()
        mean = total[:-1] / n
        centred = wide - mean.view(shape)
        var = _sum_over_ranks(centred.square().sum(dims)) / n
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            # With `momentum` None the running mean and unbiased variance are plain averages.
            weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = var.detach() * float(n) / max(float(n) - 1, 1)
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), weight)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
        out = centred * (var.view(shape) + self.eps).rsqrt()
        if self.affine:
            out = out * self.weight.view(shape)
            if self.bias is not None:
                out = out + self.bias.view(shape)
        return out.to(input.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' values, whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def _sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized():
        return values
    total: torch.Tensor = _SumOverRanks.apply(values)  # type: ignore[no-untyped-call]
    return total


def prepare_batchnorm(model: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Synchronise batch norms if `model.sync_batchnorm` is set, and warn once if their statistics are partial."""
    sync = config.model.sync_batchnorm
    norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    if sync and not norms:
        raise ConfigError(
            f"model.sync_batchnorm=true, but {type(model).__name__} has no batch norm", "remove model.sync_batchnorm"
        )
    if sync:
        for name in norms:
            _replace(model, name, CPUSyncBatchNorm if device.type == "cpu" else nn.SyncBatchNorm)
    if not norms or (dist.is_initialized() and dist.get_rank() != 0):
        return
    world = dist.get_world_size() if dist.is_initialized() else 1
    if (accum := resolve_batch(config, world)) > 1:
        logger.warning(
            "batch norm (%s) sees one micro-batch at a time: it does not treat %d accumulated ones as one large batch",
            norms[0], accum,
        )  # fmt: skip
    if world > 1 and not sync:
        logger.warning(
            "batch norm (%s) sees each rank's micro-batch alone, and the losses depend on the number of ranks: "
            "model.sync_batchnorm=true makes them the same", norms[0],
        )  # fmt: skip


def _replace(model: nn.Module, name: str, kind: Any) -> None:
    """Replace a batch norm with its synchronised twin, which takes over its parameters and buffers."""
    old: Any = model.get_submodule(name)
    if isinstance(old, (nn.SyncBatchNorm, CPUSyncBatchNorm)):
        return
    with torch.device("meta"):
        new = kind(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
    for named_tensors in (old.named_parameters(recurse=False), old.named_buffers(recurse=False)):
        for key, tensor in named_tensors:
            setattr(new, key, tensor)
    new.train(old.training)
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, new)
