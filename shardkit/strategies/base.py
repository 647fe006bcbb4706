"""What every strategy can do; the trainer, the ledger and checkpoints know no more than this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from ..weights import Weights

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Builds the optimizer from the (possibly sharded) model's parameters; called once by `Strategy.setup`."""

StateKind = Literal["params", "master_params", "grads", "optimizer"]


@dataclass(frozen=True)
class Shard:
    """The contiguous range of one flattened logical tensor that this rank holds.

    Attributes:
        name: `model.<fqn>` for weights (the fp32 master where there is one), `optim.<fqn>.<state>` for moments.
        shape: shape of the whole tensor.
        start: index of the first local element in the flattened whole.
        local: 1-D view into the engine's own memory (writing to it changes the engine's state); padding stripped.
        replica: 0 if this rank is the one that writes this range, > 0 if another rank holds the same.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    local: torch.Tensor
    replica: int = 0


class Strategy(Protocol):
    """A way to spread a model over ranks. Verbs are called in the order they stand here."""

    name: str
    model: nn.Module
    """What the training loop calls: the wrapped model."""
    optimizer: torch.optim.Optimizer
    """Holds the parameter groups whose `lr` the schedule sets."""

    def construction(self) -> AbstractContextManager[object] | None:
        """The engine's own context for building a model whose weights are drawn later; `None` = the meta device."""
        ...

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        """Bring the weights to life, wrap the model, build the optimizer: in the order this engine needs."""
        ...

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward and backward; `is_last` on the step's last."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a loss already scaled by world_size / N (N = the step's global target count)."""
        ...

    def step(self, max_norm: float | None) -> torch.Tensor:
        """Clip to `max_norm`, update, clear gradients; the global gradient norm before clipping (0-d, not synced)."""
        ...

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        """Every local tensor that holds state, the engine's flat buffers too; the ledger counts each storage once."""
        ...

    def shards(self) -> Iterator[Shard]:
        """This rank's ranges of every weight and optimizer moment."""
        ...

    def teardown(self) -> None:
        """Release what outlives the model (hooks, engine singletons)."""
        ...
