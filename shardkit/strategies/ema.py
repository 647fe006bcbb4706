"""A strategy that also keeps an exponential moving average of the weights, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ..memory.rows import StateKind
from ..parallel.compat import lerp_all
from ..parallel.weights import Weights
from .base import OptimizerFactory, Shard, StepRequest, Strategy, Update

_MODEL, _EMA = "model.", "ema."


class EMA(Strategy):
    """Wraps any strategy; after each step: average ← decay · average + (1 - decay) · weight.

    A rank averages only the ranges that it writes to checkpoints (of the fp32 masters, if there are any). Evaluation
    exchanges the values of weights and averages, not the tensors, so that engines and compiled code keep their tensors.
    Checkpoints hold the averages as `ema.<fqn>`. `decay`: share of the average that a step keeps; a weight's half-life
    is ln 2 / (1 - decay) steps.
    """

    def __init__(self, inner: Strategy, decay: float) -> None:
        self.inner = inner
        self._decay = decay
        self._averages: list[torch.Tensor] = []
        self._followed: list[torch.Tensor] = []
        """The weights of each average, views into the engine's memory; addresses stay after the first step."""
        self.name, self.facts = inner.name, inner.facts
        # Methods that the average does not affect are the engine's own, called directly: a hook that `Strategy` gets
        # later must not do nothing here.
        for name, member in vars(Strategy).items():
            if callable(member) and not name.startswith("_") and name not in vars(EMA):
                setattr(self, name, getattr(inner, name))

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        self.inner.setup(model, blocks, make_optimizer, weights)
        self.facts, self.model, self.optimizer = self.inner.facts, self.inner.model, self.inner.optimizer
        self._averages = [shard.local.clone() for shard in self._weights()]

    @torch.no_grad()
    def step(self, request: StepRequest) -> Update:
        update = self.inner.step(request)
        if update.updated:
            self._followed = self._followed or [shard.local for shard in self._weights()]
            lerp_all(self._averages, self._followed, 1 - self._decay)
        return update

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for shard, average in zip(self._weights(), self._averages, strict=True):
            saved = average.clone()
            average.copy_(shard.local)
            shard.local.copy_(saved)
        self.inner.weights_changed()

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        yield from self.inner.state_tensors()
        for average in self._averages:
            yield "optimizer", average

    def shards(self) -> Iterator[Shard]:
        yield from self.inner.shards()
        yield from self._average_shards()

    def load_targets(self) -> Iterator[Shard]:
        yield from self.inner.load_targets()
        yield from self._average_shards()

    def _weights(self) -> list[Shard]:
        """This rank's own ranges of the weights, always in the same order."""
        return [shard for shard in self.inner.shards() if shard.name.startswith(_MODEL)]

    def _average_shards(self) -> Iterator[Shard]:
        for shard, average in zip(self._weights(), self._averages, strict=True):
            yield replace(shard, name=_EMA + shard.name.removeprefix(_MODEL), local=average)

    def teardown(self) -> None:
        self._averages.clear()
        self._followed.clear()
        self.inner.teardown()
