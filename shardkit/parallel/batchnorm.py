"""Batch normalisation with the statistics of all ranks' micro-batches, on the CPU too."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.load import resolve_batch
from ..config.schema import RunConfig
from ..errors import ConfigError

logger = logging.getLogger(__name__)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class CPUSyncBatchNorm(nn.BatchNorm1d):
    """`nn.SyncBatchNorm` for the CPU, as torch's needs a GPU. Ranks exchange sums, so their batch sizes may differ."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self._with_running(input)
        dims = [d for d in range(input.dim()) if d != 1]
        wide = input.float()
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = wide.new_full((1,), input.numel() / input.shape[1])
        total = _sum_over_ranks(torch.cat([wide.sum(dims), count]))
        n = total[-1].detach()
        mean = total[:-1] / n
        centred = wide - mean.view(shape)
        var = _sum_over_ranks(centred.square().sum(dims)) / n
        self._track(mean.detach(), var.detach(), float(n))
        out = centred * (var.view(shape) + self.eps).rsqrt()
        if self.affine:
            out = out * self.weight.view(shape)
            if self.bias is not None:
                out = out + self.bias.view(shape)
        return out.to(input.dtype)

    def _with_running(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise with the running statistics, or, if there are none, with this batch's, as torch does."""
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias,
            training=self.running_mean is None and self.running_var is None, eps=self.eps,
        )  # fmt: skip

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor, n: float) -> None:
        """Update the running mean and unbiased variance; with `momentum` None they are plain averages."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_((var * n / max(n - 1, 1)).to(self.running_var.dtype), weight)


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
    norms = [name for name, module in model.named_modules() if isinstance(module, _NORMS)]
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
    _warn(norms[0], resolve_batch(config, world), apart=world > 1 and not sync)


def _warn(name: str, accum: int, apart: bool) -> None:
    """Warn that batch norm sees single micro-batches, or each rank's alone (`apart`)."""
    if accum > 1:
        logger.warning(
            "batch norm (%s) sees one micro-batch at a time: it does not treat %d accumulated ones as one large batch",
            name,
            accum,
        )
    if apart:
        logger.warning(
            "batch norm (%s) sees each rank's micro-batch alone, and the losses depend on the number of ranks: "
            "model.sync_batchnorm=true makes them the same",
            name,
        )


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
