"""Data parallelism: the whole model on every rank, gradients averaged in buckets during backward."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

from ..config.schema import RunConfig
from ..errors import ConfigError, listed
from ..parallel.blocks import chosen_by_data
from ..parallel.compat import GradBucket, not_reduced
from ..parallel.precision import autocast_forward, loss_scaler, reduce_dtype
from ..parallel.weights import Weights, exchange
from ..parallel.world import World
from .base import Facts, OptimizerFactory, StepRequest, Update
from .states import TorchStates, flat
from .step import clip_and_step

_LOG = logging.getLogger(__name__)
_WATCHDOG_S = 0.2
"""Twice the interval at which NCCL's watchdog releases collectives that have ended (kWatchdogThreadSleepMillis)."""


def own_or_models(wrapper: nn.Module, name: str) -> Any:
    """An attribute of a wrapper, else of the model inside it."""
    try:
        return nn.Module.__getattr__(wrapper, name)
    except AttributeError:
        if name == "module":  # read before it is set
            raise
        return getattr(wrapper.module, name)


class Wrapped(DistributedDataParallel):
    """torch's wrapper, with the attributes of the model inside it (a tokenizer, a preprocessor)."""

    __getattr__ = own_or_models


class DDP(TorchStates):
    name = "ddp"
    facts = Facts()
    model: nn.Module

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._scaler = loss_scaler(config.precision, world.device)
        self._no_sync = config.parallel.no_sync is not False
        self._bucket_mb = config.parallel.bucket_mb or 25.0  # torch's own default

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        device = self._world.device
        weights.materialise(model, device, self._world)
        autocast_forward(model, device, self._config.precision)
        find_unused = self._config.parallel.find_unused
        self.facts = Facts(reduces_missing_grads=find_unused is not False)
        self._wrapped = self.wrap(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,  # gradients live in the buckets, which saves 4P bytes
            find_unused_parameters=bool(chosen_by_data(model, blocks)) if find_unused is None else find_unused,
        )
        self._set_reduction()
        self.model, self._bare = self._wrapped, model
        self.optimizer = make_optimizer(model)
        self._parameters = list(model.parameters())
        self._keeps_buckets = self._told_unused = False

    def wrap(self, model: nn.Module, **options: Any) -> Wrapped:
        """The model in torch's wrapper; `options` are those of `DistributedDataParallel`."""
        return Wrapped(model, **options)

    def _set_reduction(self) -> None:
        """Register a hook that averages a gradient bucket over ranks, if torch's own all-reduce will not do."""
        if self._world.size == 1:
            return
        average: Any = None
        if self._config.train.deterministic:
            # DDP rearranges its buckets after the first backward, and an all-reduce sums ranks in an order that depends
            # on an element's position in its bucket: a resumed run's first step would round differently.
            average = average_in_rank_order
        compressed = {torch.bfloat16: bf16_compress_wrapper, torch.float16: fp16_compress_wrapper}
        wrapper = compressed.get(reduce_dtype(self._config.precision))
        if wrapper is not None and self._config.precision.mode != "pure_bf16":
            average = wrapper(average or allreduce_hook)
        if average is not None:
            # A lambda, because torch compares annotations with types, and ours are strings.
            self._wrapped.register_comm_hook(None, lambda state, bucket: average(state, bucket))

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        if self._no_sync and not is_last:
            return self._wrapped.no_sync()
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        scaled = self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        self.reduce_unused()

    def reduce_unused(self) -> None:
        """Complete the reduction of a backward that gave some parameters no gradient on this rank: their part is zero.

        The other ranks wait for it. The zeros are negative: their sum over ranks is negative zero only where no rank
        has another gradient, and such a parameter is left without one, as in one process.
        """
        indices = not_reduced(self._wrapped)
        if not indices:
            return
        trained = [(name, param) for name, param in self._bare.named_parameters() if param.requires_grad]
        unused = dict(trained[index] for index in indices)
        if self._config.parallel.find_unused is False:
            raise ConfigError(
                f"{len(unused)} parameters got no gradient ({listed(sorted(unused))}), and parallel.find_unused=false "
                "says that every parameter gets one",
                "remove parallel.find_unused",
            )
        params = [*unused.values()]
        zeros = [param.new_full((), -0.0).expand_as(param) for param in params]
        torch.autograd.backward(params, zeros)
        grads = [param.grad for param in params if param.grad is not None]
        flags = torch.stack([(grad == 0).logical_and(grad.signbit()).all() for grad in grads]).tolist()
        for param, is_unused in zip(params, flags, strict=True):
            if is_unused:
                param.grad = None
        if not self._told_unused and self._world.rank == 0:
            self._told_unused = True
            _LOG.info("a step gave %s no gradient on rank 0: averaged as zero, or left alone if no rank has one",
                      listed(sorted(unused)))  # fmt: skip

    def step(self, request: StepRequest) -> Update:
        update = clip_and_step(self._parameters, self.optimizer, self._scaler, request)
        if not self._keeps_buckets:
            self._keeps_buckets = True
            if self._world.device.type == "cuda":
                # The second forward allocates new buckets: NCCL's watchdog must have released the old ones by then.
                torch.cuda.synchronize(self._world.device)
                time.sleep(_WATCHDOG_S)
        return update

    def weights_changed(self, replicas_equal: bool = False) -> None:
        """Exchange the ranges that each rank has written, bit for bit."""
        if not replicas_equal:
            exchange([flat(fqn, param) for fqn, param in self._bare.named_parameters()])


def average_in_rank_order(group: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce of a gradient bucket whose bits do not depend on the bucket: each element is summed rank 0 first.

    It sends as many bytes as any all-reduce (a reduce-scatter by all-to-all, then an all-gather), but it is
    synchronous and takes two more buffers of the bucket's size.
    """
    grads, world_size = bucket.buffer(), dist.get_world_size()
    part = -(-grads.numel() // world_size)
    padded = nn.functional.pad(grads, (0, part * world_size - grads.numel()))
    pieces = torch.empty_like(padded)
    dist.all_to_all_single(pieces, padded)
    total, *later_pieces = pieces.view(world_size, part)
    for piece in later_pieces:
        total += piece
    total /= world_size
    dist.all_gather(list(padded.view(world_size, part)), total)
    grads.copy_(padded[: grads.numel()])
    on_gpu = grads.device.type == "cuda"
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[grads.device] if on_gpu else None)
    future.set_result(grads)
    return future
