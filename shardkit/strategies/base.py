"""The contract of an engine, as the training loop, the ledger and checkpoints use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from ..config.schema import RunConfig
from ..memory.rows import StateKind
from ..parallel.runs import Runs
from ..parallel.weights import Weights

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Builds the optimizer from the (possibly sharded) model's parameters; called once by `Strategy.setup`."""


@dataclass(frozen=True)
class Shard:
    """The elements of one flattened logical tensor that this rank holds: one range, or runs of equal length."""

    # `model.<fqn>` for weights (the fp32 master if there is one), `optim.<fqn>.<state>` for moments, `buffer.<fqn>` for
    # persistent buffers.
    name: str
    shape: tuple[int, ...]  # shape of the whole tensor
    start: int  # index of the first local element in the flattened whole
    # 1-D view into the engine's own memory (writing to it changes the engine's state); padding stripped
    local: torch.Tensor
    replica: int = 0  # 0 if this rank writes the range to checkpoints, > 0 if another rank writes it
    # elements of each run and distance of their first elements, if the tensor is cut along an inner dimension; 0 if
    # `local` is one range
    run: int = 0
    stride: int = 0

    @property
    def runs(self) -> Runs:
        return Runs(self.start, self.local.numel(), self.run, self.stride)

    def ranges(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each range: index of its first element in the flattened whole, and its part of `local`."""
        run = self.run or max(self.local.numel(), 1)
        for index, at in enumerate(range(0, self.local.numel(), run)):
            yield self.start + index * self.stride, self.local[at : at + run]


@dataclass(frozen=True)
class Facts:
    """What callers need to know about an engine, where they would otherwise compare names."""

    shards_state: bool = False  # a rank holds a part of the weights or of their optimizer state
    shards_parameters: bool = False  # a rank holds a part of each parameter, so forward gathers them
    gathers_by_layer: bool = False  # every module gathers the parameters that it holds itself (ZeRO-3)
    hooks_modules: bool = False  # the engine's hooks on modules have to stay outside of compiled blocks
    hooks_model: bool = True  # the engine hooks into the call of the whole model, so the loss must call it
    needs_same_calls: bool = False  # collectives are paired by their order: ranks must call the same blocks
    reduces_missing_grads: bool = False  # gradients that only some ranks have are averaged as they should be
    counts_unused_as_zero: bool = False  # a parameter that this rank did not use has a gradient of zero
    # the host waits for the device in `finish_backward`, and has time for other work before it
    waits_in_backward: bool = False


@dataclass(frozen=True)
class StepRequest:
    """What a step is taken with: an option of it is a key of the config, which is read where it acts."""

    config: RunConfig
    blocks: Mapping[str, nn.Module] = field(default_factory=dict)  # the repeated blocks of the wrapped model, by name


@dataclass(frozen=True)
class Update:
    """The figures of one step."""

    grad_norm: torch.Tensor  # global norm of the gradient before clipping; 0-d, not synced to the host
    # False if loss scaling skipped the update, on every rank. Without loss scaling the device decides by the norm, for
    # which the host does not wait: True then.
    updated: bool
    # further figures by name, 0-d and not synced to the host; rank 0 writes its own to the step's line of
    # `metrics.jsonl`.
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Strategy:
    """A way to spread a model over ranks. An engine is a subclass; its methods are called in the order of this class.

    Methods that raise `NotImplementedError` here are every engine's own. The others are optional: what stands here does
    nothing.

    Attributes:
        name: the value of `parallel.strategy`.
        facts: what the engine does; final after `setup`.
        model: the wrapped model, which the training loop calls.
        optimizer: the schedule sets the `lr` of its parameter groups.
    """

    name: str
    facts: Facts
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def construction(self) -> AbstractContextManager[object] | None:
        """The engine's own context for building a model whose weights are drawn later; `None` = parameters on meta."""
        return None

    def setup(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: OptimizerFactory, weights: Weights
    ) -> None:
        """Materialise the weights, wrap the model and build the optimizer, in the order this engine needs."""
        raise NotImplementedError

    def accumulate(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward and backward; `is_last` on the step's last."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a loss already scaled by world_size / N (N = the step's global target count)."""
        raise NotImplementedError

    def finish_backward(self) -> None:
        """Complete the reduction that the step's last `backward` has begun; called once a step."""

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient over all ranks, whole or as a DTensor, between the last backward and `step`; collective.

        It is not clipped, and not scaled. `None`: the step does not use the parameter, or backward has updated it.
        """
        grad, scale = parameter.grad, self.loss_scale()
        return grad if grad is None or scale == 1 else grad / scale

    def step(self, request: StepRequest) -> Update:
        """Clip to `train.max_norm`, update, clear gradients."""
        raise NotImplementedError

    def loss_scale(self) -> float:
        """The factor by which fp16 multiplies the loss now; 1 without scaling."""
        raise NotImplementedError

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of an evaluation, which uses the weights' moving averages if there are any."""
        return nullcontext()

    def weights_changed(self, replicas_equal: bool = False) -> None:
        """Make the model compute with weights written through `shards` or `load_targets`; collective.

        `replicas_equal`: every rank has written its `load_targets` from the same bytes: replicated weights are equal.
        """

    def state_tensors(self) -> Iterator[tuple[StateKind, torch.Tensor]]:
        """Every local tensor of state, including the engine's flat buffers; the ledger counts each storage once."""
        raise NotImplementedError

    def communication_tensors(self) -> Iterator[torch.Tensor]:
        """The engine's buffers through which parameters and gradients pass; their storages may be empty."""
        return iter(())

    def shards(self) -> Iterator[Shard]:
        """This rank's ranges of every weight, optimizer moment and persistent buffer, for saving."""
        raise NotImplementedError

    def create_optimizer_state(self, stateless: Collection[str] = ()) -> None:
        """Create the optimizer state that exists from the first step on: a load writes into it.

        `stateless`: names of parameters that had no state when it was saved (no step had used them): they get none.
        """
        raise NotImplementedError

    def load_targets(self) -> Iterator[Shard]:
        """Every range that a load fills on this rank: like `shards`, but replicated tensors are whole on every rank."""
        raise NotImplementedError

    def scalars(self) -> dict[str, float]:
        """State that is one number: `optim.<fqn>.step`, and `engine.*` (a loss scaler); the same on every rank.
        CheckpointError if a state is neither one number nor elementwise, so that it has no place in a checkpoint."""
        raise NotImplementedError

    def after_load(self, scalars: Mapping[str, float]) -> None:
        """Restore saved `scalars` and update everything derived from the loaded ranges; collective. CheckpointError if
        a number is missing, or the engine cannot hold the saved values."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Release objects that outlive the model (hooks, engine singletons)."""

    # What ranks tell each other where they may call different modules; `run/block_calls.py` calls these.

    def hold(self, part: nn.Module) -> None:
        """Gather all parameters of a part of the model, which some ranks skip in this forward, and leave them gathered
        until its backward has reduced their gradients; called on every rank alike, in forward."""

    def release(self) -> None:
        """Free what `hold` has gathered, after a forward without gradients; called on every rank alike."""

    def is_held(self, module: nn.Module) -> bool:
        """Whether calls of a module gather nothing, since its parameters stay gathered for the whole step."""
        return False

    def unused(self) -> list[str]:
        """Names of the parameters to which this rank gave no gradient in the present step, where the engine counts."""
        return []

    def compare_gathers(self, compare: Callable[[str], None]) -> None:
        """Call `compare` from now on with a name before this rank alone would gather a parameter."""

    def allow_differing_use(self, names: Collection[str]) -> None:
        """Let ranks use these parameters differently from the present micro-batch on; called on every rank alike,
        between forward and backward."""

    def gather_with_block(self, block: nn.Module, part: nn.Module) -> None:
        """Gather a part of a block now, and later with the block; called on every rank alike, in forward."""

    def explained(self, error: Exception) -> Exception:
        """A `ConfigError` in place of a library's error about a model that the engine cannot hold; else the error."""
        return error
