"""One process, one device, the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ..config import RunConfig
from ..dist import World
from ..memory.rows import StateKind
from ..memory.state import module_state
from ..precision import autocast_forward, compute_dtype
from ..weights import Weights
from .base import OptimizerFactory, Shard
from .local import clip_and_step, load_local_scalars, local_scalars, local_shards
from .states import create_all_states


class Single:
    name = "single"
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config = config
        self._world = world

    def construction(self) -> AbstractContextManager[object] | None:
        return None

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        weights.materialise(model, self._world.device)
        autocast_forward(model, self._world.device, compute_dtype(self._config.precision))
        self.model = model
        self.optimizer = make_optimizer(model)

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, max_norm: float | None) -> torch.Tensor:
        return clip_and_step(self.model, self.optimizer, max_norm)

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        return module_state(self.model, self.optimizer)

    def shards(self) -> Iterator[Shard]:
        return local_shards(self.model, self.optimizer, 0, 1)

    def create_optimizer_state(self) -> None:
        create_all_states(self.optimizer)

    def load_targets(self) -> Iterator[Shard]:
        return self.shards()

    def scalars(self) -> dict[str, float]:
        return local_scalars(self.model, self.optimizer)

    def after_load(self, scalars: Mapping[str, float]) -> None:
        load_local_scalars(self.model, self.optimizer, scalars)

    def teardown(self) -> None:
        pass
