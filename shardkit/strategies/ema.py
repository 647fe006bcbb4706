"""A strategy that also keeps an exponential moving average of the weights, sharded as the weights are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ..memory.rows import StateKind
from ..parallel.compat import lerp_all
from ..parallel.weights import Weights
from .base import OptimizerFactory, Shard, Strategy

_MODEL, _EMA = "model.", "ema."


class EMA:
    """Any strategy, and after each of its steps: average ← decay · average + (1 - decay) · weight.

    Where each rank holds whole parameters it averages whole parameters; where it holds a shard (of the fp32 masters, if
    there are any), that shard. Evaluation exchanges the values of weights and averages, not the tensors, so that
    compiled code and engines do not notice. Checkpoints hold the averages as `ema.<fqn>`.

    Args:
        decay: the half-life of a weight is ln 2 / (1 - decay) steps.
    """

    def __init__(self, inner: Strategy, decay: float) -> None:
        self._inner = inner
        self._decay = decay
        self._averages: dict[tuple[str, int], torch.Tensor] = {}
        self.name = inner.name
        # What an average changes nothing of is the engine's own, called without a detour.
        self.construction, self.create_optimizer_state = inner.construction, inner.create_optimizer_state
        self.accumulate, self.backward, self.loss_scale = inner.accumulate, inner.backward, inner.loss_scale
        self.weights_changed, self.scalars, self.after_load = inner.weights_changed, inner.scalars, inner.after_load

    @property
    def model(self) -> nn.Module:
        return self._inner.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._inner.optimizer

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        self._inner.setup(model, blocks, make_optimizer, weights)
        self._averages = {key: local.clone() for key, local in self._weights().items()}

    @torch.no_grad()
    def step(self, max_norm: float | None) -> torch.Tensor:
        norm = self._inner.step(max_norm)
        if self._inner.loss_scale() == 1 or math.isfinite(float(norm)):  # else the step was skipped
            lerp_all(list(self._averages.values()), list(self._weights().values()), 1 - self._decay)
        return norm

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for key, local in self._weights().items():
            average = self._averages[key]
            kept = average.clone()
            average.copy_(local)
            local.copy_(kept)
        self._inner.weights_changed()

    def _weights(self) -> dict[tuple[str, int], torch.Tensor]:
        """(name, start) → what this rank holds of each weight, always in the same order."""
        held = (shard for shard in self._inner.load_targets() if _is_weight(shard))
        return {(shard.name, shard.start): shard.local for shard in held}

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        yield from self._inner.state_tensors()
        for average in self._averages.values():
            yield "optimizer", average

    def shards(self) -> Iterator[Shard]:
        return self._with_averages(self._inner.shards())

    def load_targets(self) -> Iterator[Shard]:
        return self._with_averages(self._inner.load_targets())

    def _with_averages(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        held = {name: (start, average) for (name, start), average in self._averages.items()}
        for shard in shards:
            yield shard
            if _is_weight(shard):
                start, average = held[shard.name]  # what is written is a part of the one range that is held
                first = shard.start - start
                mine = average[first : first + shard.local.numel()]
                yield replace(shard, name=_EMA + shard.name.removeprefix(_MODEL), local=mine)

    def teardown(self) -> None:
        self._averages.clear()
        self._inner.teardown()


def _is_weight(shard: Shard) -> bool:
    return shard.name.startswith(_MODEL)
