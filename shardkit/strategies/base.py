"""What every strategy can do; the trainer, the ledger and checkpoints know no more than this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..memory.rows import StateKind
from ..parallel.weights import Weights

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Builds the optimizer from the (possibly sharded) model's parameters; called once by `Strategy.setup`."""


@dataclass(frozen=True)
class Shard:
    """The contiguous range of one flattened logical tensor that this rank holds.

    Attributes:
        name: `model.<fqn>` for weights (the fp32 master where there is one), `optim.<fqn>.<state>` for moments,
            `buffer.<fqn>` for persistent buffers.
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

    @property
    def model(self) -> nn.Module:
        """What the training loop calls: the wrapped model."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Holds the parameter groups whose `lr` the schedule sets."""
        ...

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

    def loss_scale(self) -> float:
        """What fp16 multiplies the loss by at this moment; 1 without scaling. Then a norm that is not finite means
        that the step was skipped, on every rank."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of an evaluation: the weights in it are those to judge (their averages, where there are any)."""
        ...

    def weights_changed(self) -> None:
        """Make what the model computes with follow weights written through `shards` or `load_targets`; collective."""
        ...

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        """Every local tensor that holds state, the engine's flat buffers too; the ledger counts each storage once."""
        ...

    def shards(self) -> Iterator[Shard]:
        """This rank's ranges of every weight, optimizer moment and persistent buffer; what ranks hold twice once."""
        ...

    def create_optimizer_state(self) -> None:
        """Make the optimizer states that exist from the first step on, so that a load has where to write."""
        ...

    def load_targets(self) -> Iterator[Shard]:
        """Every range that a load fills on this rank: `shards`, and what each rank holds whole in whole."""
        ...

    def scalars(self) -> dict[str, float]:
        """States that are one number: `optim.<fqn>.step`, and `engine.*` (a loss scaler); the same on every rank.

        Raises:
            CheckpointError: a state is neither one number nor elementwise, so it has no place in a checkpoint.
        """
        ...

    def after_load(self, scalars: Mapping[str, float]) -> None:
        """Take over saved `scalars` and make everything derived from the loaded ranges follow them; collective.

        Raises:
            CheckpointError: a number is missing, or the engine cannot hold what was saved.
        """
        ...

    def teardown(self) -> None:
        """Release what outlives the model (hooks, engine singletons)."""
        ...
