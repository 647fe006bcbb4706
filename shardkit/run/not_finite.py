"""What happens on a loss or a gradient that is not finite: the run ends, before that step is saved.

The errors name the ranks, and for a gradient the parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import SHOWN, TrainingError, listed
from ..parallel.world import World
from ..strategies.step import accumulate

if TYPE_CHECKING:
    from .optimizer_step import OptimizerStep

_LOG = logging.getLogger(__name__)


def not_finite_loss(world: World, step: int, local_loss: float) -> TrainingError:
    """The error that names the ranks whose loss is not finite; collective."""
    losses = [float(v) for v in world.gather(local_loss)]  # type: ignore[arg-type]
    bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    ranks = ", ".join(map(str, bad_ranks)) or "none alone, but their sum is"
    return TrainingError(
        f"the loss is not finite at step {step} on rank {ranks} (summed loss {[losses[r] for r in bad_ranks][:4]})",
        "lower optim.lr, set train.max_norm, or look at that step's data; nothing after it was saved",
    )


def not_finite_gradient(step: OptimizerStep) -> TrainingError:
    """The error that names the ranks and parameters whose gradient is not finite; collective.

    The gradients are reduced and gone by then: repeating the step's forward and backward shows each rank's own. If the
    update could not be skipped and has spoilt the state, the error names that state.
    """
    world = step.job.world
    spoilt = sorted({s.name.partition(".")[2] for s in step.job.strategy.shards() if not s.local.isfinite().all()})
    if any(world.gather(bool(spoilt))):
        bad_names = sorted({str(name) for names in world.gather(spoilt[:SHOWN]) for name in names})  # type: ignore[attr-defined]
        state = f"nor is the state after its update: {listed(bad_names)}"
        cause = f"the gradient is not finite at step {step.number}, {state}"
    else:
        cause = _own_gradients(step)
    return TrainingError(
        cause,
        "look at the loss on that step's data (a division by 0, a root or log of 0), lower optim.lr, or train in fp32; "
        f"nothing after step {step.number - 1} was saved, checkpoints hold the state before",
    )


def _own_gradients(step: OptimizerStep) -> str:
    """Repeat the step's passes and name the ranks whose own gradients are not finite."""
    job, world, number = step.job, step.job.world, step.number
    largest: dict[str, torch.Tensor] = {}
    with watching_gradients(job.model, largest):
        try:
            accumulate(
                job.strategy, job.ledger, step.micro_batches, step.loss_fn, step.n_targets, world.size, world.device
            )
        except Exception as error:  # the error is then reported without its origin
            _LOG.warning("cannot repeat step %d to find its bad gradient: %s: %s", number, type(error).__name__, error)
    sizes = {fqn: float(value) for fqn, value in largest.items()}
    bad = [fqn for fqn, size in sizes.items() if not math.isfinite(size)]
    top = max(sizes, key=sizes.__getitem__, default="") if not bad else ""
    reports: list[Any] = world.gather((len(bad), bad[:SHOWN], len(sizes), top, sizes.get(top, 0.0)))
    ranks = [rank for rank, (n_bad, *_) in enumerate(reports) if n_bad]
    if ranks:
        n_bad, names, total, *_ = reports[ranks[0]]
        on = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
        return (
            f"the gradient is not finite at step {number} on {on}: {', '.join(names)} ({n_bad} of {total} parameters)"
        )
    rank, (*_, name, size) = max(enumerate(reports), key=lambda item: item[1][-1])
    if size < math.sqrt(torch.finfo(torch.float32).max) / 2**20:
        return f"the gradient is not finite at step {number}, but finite on every rank when the step is repeated"
    return (
        f"the gradient norm overflowed at step {number}: every gradient is finite, the largest element {size:.0e} "
        f"({name} on rank {rank})"
    )


@contextmanager
def watching_gradients(model: nn.Module, largest: dict[str, torch.Tensor]) -> Iterator[None]:
    """Record the largest magnitude of each parameter's gradient as backward makes it, before any reduction.

    Parameters are looked up when each module's forward runs: engines that shard replace them.
    """
    handles: list[Any] = []
    seen: dict[int, torch.Tensor] = {}

    def note(fqn: str, grad: torch.Tensor) -> None:
        if grad.numel():
            largest[fqn] = torch.maximum(largest[fqn], grad.detach().abs().max().float())  # keeps NaN

    def look(prefix: str, module: nn.Module, args: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad and id(param) not in seen:
                seen[id(param)] = param
                fqn = f"{prefix}.{name}".lstrip(".").removeprefix("module.")
                largest[fqn] = torch.zeros((), device=param.device)
                handles.append(param.register_hook(partial(note, fqn)))  # type: ignore[no-untyped-call]

    for prefix, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(look, prefix)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
