"""The protocol of engines, as the training loop, the ledger and checkpoints use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
        name: `model.<fqn>` for weights (the fp32 master if there is one), `optim.<fqn>.<state>` for moments,
            `buffer.<fqn>` for persistent buffers.
        shape: shape of the whole tensor.
        start: index of the first local element in the flattened whole.
        local: 1-D view into the engine's own memory (writing to it changes the engine's state); padding stripped.
        replica: 0 if this rank writes the range to checkpoints, > 0 if another rank writes it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    local: torch.Tensor
    replica: int = 0


@dataclass(frozen=True)
class Facts:
    """What callers need to know about an engine, where they would otherwise compare names.

    Attributes:
        shards_state: a rank holds a part of the weights or of their optimizer state.
        shards_parameters: a rank holds a part of each parameter, so forward gathers them.
        gathers_by_layer: every module gathers the parameters that it holds itself (ZeRO-3).
        hooks_modules: the engine's hooks on modules have to stay outside of compiled blocks.
        hooks_model: the engine hooks into the call of the whole model, so the loss must call it.
        needs_same_calls: collectives are paired by their order: ranks must call the same blocks.
        reduces_missing_grads: gradients that only some ranks have are averaged as they should be.
        counts_unused_as_zero: a parameter that this rank did not use has a gradient of zero.
    """

    shards_state: bool = False
    shards_parameters: bool = False
    gathers_by_layer: bool = False
    hooks_modules: bool = False
    hooks_model: bool = True
    needs_same_calls: bool = False
    reduces_missing_grads: bool = False
    counts_unused_as_zero: bool = False


class Update(NamedTuple):
    """What an engine's `step` did.

    Attributes:
        grad_norm: global norm of the gradient before clipping; 0-d, not synced to the host.
        updated: False if loss scaling skipped the update, on every rank. Without loss scaling the device decides by the
            norm, and a norm that is not finite ends the run: True then.
    """

    grad_norm: torch.Tensor
    updated: bool


class Strategy(Protocol):
    """A way to spread a model over ranks. Its methods are called in the order of this class."""

    name: str

    @property
    def facts(self) -> Facts:
        """What the engine does; final after `setup`."""
        ...

    @property
    def model(self) -> nn.Module:
        """The wrapped model, which the training loop calls."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; the schedule sets the `lr` of its parameter groups."""
        ...

    def construction(self) -> AbstractContextManager[object] | None:
        """The engine's own context for building a model whose weights are drawn later; `None` = parameters on meta."""
        ...

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        """Materialise the weights, wrap the model and build the optimizer, in the order this engine needs."""
        ...

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward and backward; `is_last` on the step's last."""
        ...

    def backward(self, loss: torch.Tensor, meanwhile: Callable[[], object] | None = None) -> None:
        """Backward of a loss already scaled by world_size / N (N = the step's global target count).

        Args:
            meanwhile: called when all of backward is issued, if the host then waits for the device; else not.
        """
        ...

    def step(self, max_norm: float | None) -> Update:
        """Clip to `max_norm`, update, clear gradients; returns the norm, and whether the update took place."""
        ...

    def loss_scale(self) -> float:
        """The factor by which fp16 multiplies the loss now; 1 without scaling."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of an evaluation, which uses the weights' moving averages if there are any."""
        ...

    def weights_changed(self, replicas_equal: bool = False) -> None:
        """Make the model compute with weights written through `shards` or `load_targets`; collective.

        Args:
            replicas_equal: every rank has written its `load_targets` from the same bytes: replicated weights are equal.
        """
        ...

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        """Every local tensor of state, including the engine's flat buffers; the ledger counts each storage once."""
        ...

    def shards(self) -> Iterator[Shard]:
        """This rank's ranges of every weight, optimizer moment and persistent buffer, for saving."""
        ...

    def create_optimizer_state(self, stateless: Collection[str] = ()) -> None:
        """Create the optimizer state that exists from the first step on: a load writes into it.

        Args:
            stateless: names of parameters that had no state when it was saved (no step had used them): they get none.
        """
        ...

    def load_targets(self) -> Iterator[Shard]:
        """Every range that a load fills on this rank: like `shards`, but replicated tensors are whole on every rank."""
        ...

    def scalars(self) -> dict[str, float]:
        """State that is one number: `optim.<fqn>.step`, and `engine.*` (a loss scaler); the same on every rank.

        Raises:
            CheckpointError: a state is neither one number nor elementwise, so it has no place in a checkpoint.
        """
        ...

    def after_load(self, scalars: Mapping[str, float]) -> None:
        """Restore saved `scalars` and update everything derived from the loaded ranges; collective.

        Raises:
            CheckpointError: a number is missing, or the engine cannot hold the saved values.
        """
        ...

    def teardown(self) -> None:
        """Release objects that outlive the model (hooks, engine singletons)."""
        ...
