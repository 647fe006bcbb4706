"""Data parallelism: the whole model on every rank, gradients averaged in buckets while backward goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config import RunConfig
from ..dist import World
from ..precision import autocast_forward, compute_dtype
from ..weights import Weights
from .base import OptimizerFactory, Shard, StateKind
from .local import clip_and_step, load_local_scalars, local_scalars, local_shards, local_state
from .states import create_all_states


class DDP:
    name = "ddp"
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._no_sync = config.parallel.no_sync is not False
        self._bucket_mb = config.parallel.bucket_mb or 25.0  # torch's own default

    def construction(self) -> AbstractContextManager[object] | None:
        return None

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        device = self._world.device
        weights.materialise(model, device)
        autocast_forward(model, device, compute_dtype(self._config.precision))
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,  # gradients live in the buckets: 4P bytes less
        )
        self.model = self._wrapped
        self.optimizer = make_optimizer(model)

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        if self._no_sync and not is_last:
            return self._wrapped.no_sync()
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, max_norm: float | None) -> torch.Tensor:
        return clip_and_step(self.model, self.optimizer, max_norm)

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        return local_state(self.model, self.optimizer)

    def shards(self) -> Iterator[Shard]:
        return local_shards(self._wrapped.module, self.optimizer, self._world.rank, self._world.size)

    def create_optimizer_state(self) -> None:
        create_all_states(self.optimizer)

    def load_targets(self) -> Iterator[Shard]:
        return local_shards(self._wrapped.module, self.optimizer, 0, 1)

    def scalars(self) -> dict[str, float]:
        return local_scalars(self._wrapped.module, self.optimizer)

    def after_load(self, scalars: Mapping[str, float]) -> None:
        load_local_scalars(self._wrapped.module, self.optimizer, scalars)

    def teardown(self) -> None:
        vars(self).clear()  # a wrapped model that outlives its process group can abort the process at exit
