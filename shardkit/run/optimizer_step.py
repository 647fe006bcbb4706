"""One optimizer step and the ranks' agreement on it, taken in the same way by the training loop and by `Job.step`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import SHOWN, ConfigError, TrainingError, listed
from ..memory.probe import Phases
from ..parallel.context import digest, refuse_whole_sequences
from ..parallel.world import World
from ..strategies.base import StepRequest
from ..strategies.step import HostValue, Mark, MicroBatch, StepOutput, Stopwatch, accumulate, update

if TYPE_CHECKING:
    from .job import Job


OnSums = Callable[[Sequence[float]], None]


class Reduction:
    """One gloo all-reduce of float64 over all ranks, made of named parts. Whoever adds a part is told its sums.

    Every rank adds the same parts in the same order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: dict[str, tuple[list[float], OnSums]] = {}
        self._end: Callable[[], list[float]] | None = None

    @property
    def has_begun(self) -> bool:
        return self._end is not None

    def add(self, name: str, values: Sequence[float], on_sums: OnSums) -> None:
        """Send `values` with the reduction; `on_sums` gets their sums over all ranks."""
        if self.has_begun or name in self._parts:
            raise ValueError(f"part {name!r} of a reduction was added twice, or too late")
        self._parts[name] = list(values), on_sums

    def begin(self) -> None:
        """Start the all-reduce. No other collective of the control group may come before `wait` or `finish`."""
        self._end = self._world.begin_sum([value for values, _ in self._parts.values() for value in values])

    def wait(self) -> list[float]:
        """Wait for the sums of all parts, in one list; tells nobody."""
        assert self._end is not None
        return self._end()

    def finish(self) -> None:
        """Wait for the sums, and tell each part its own, in the order of `add`. A part may raise.

        The parts are let go: one that belongs to the owner of this would keep the owner alive, with the data of a step.
        """
        sums = iter(self.wait())
        parts, self._parts = self._parts, {}
        for values, on_sums in parts.values():
            on_sums([next(sums) for _ in values])


@dataclass(kw_only=True)
class OptimizerStep:
    """One optimizer step over this rank's micro-batches.

    `compute` its gradients, `update` the weights, begin the agreement on the step between the two or after them.
    `refuse_bad_loss` and then `figures` decide on what is not finite, before anything is saved.
    """

    job: Job
    number: int  # the first step is 1
    micro_batches: Sequence[MicroBatch]  # this rank's
    n_targets: float  # target tokens of all ranks
    loss_fn: Callable[[Any, Any], torch.Tensor]  # (model, batch) → the loss summed over the batch's targets
    # the ranks' agreement on this step; others may add their parts until it begins
    reduction: Reduction = field(init=False)
    loss_sum: HostValue = field(init=False)  # this rank's summed loss, once its gradients are computed
    output: StepOutput = field(init=False)  # this rank's results, once the step is taken
    # the waits of forward for other ranks; `None` if they are not watched in this step
    gather_waits: Stopwatch | None = field(init=False, default=None)
    _turns: list[Mark] = field(init=False)
    # mean over the targets of all ranks; NaN before the ranks agree, and if it is not finite
    loss: float = field(init=False, default=math.nan)

    def __post_init__(self) -> None:
        self.reduction = Reduction(self.job.world)

    def compute(self, phases: Phases, watches_gathers: bool) -> None:
        """Forward and backward of all micro-batches; the device may still work on them afterwards.

        `phases`: where the memory of the step's phases is accounted. `watches_gathers`: whether to time forward's waits
        for other ranks, even if that costs something.
        """
        job, world = self.job, self.job.world
        context = world.context
        if context is not None and not context.is_checked:
            digests = world.gather(digest(batch for batch, _ in self.micro_batches))
            refuse_whole_sequences(context, digests[:: world.tp], world.tp)
        with job.calls.waits.watching(watches_gathers) as self.gather_waits:
            self.loss_sum, self._turns = accumulate(
                job.strategy, phases, self.micro_batches, self.loss_fn, self.n_targets, world.loss_size, world.device
            )
        if context is not None and not context.is_used and not job.config.compile.enabled:
            raise ConfigError(
                f"parallel.cp={context.size}: no attention exchanged heads: each rank attended to its part of the "
                "sequences alone",
                "call context.to_heads and to_positions in its forward (docs/long.md)",
            )

    @property
    def host_has_time(self) -> bool:
        """Whether the host should do its own work, and send its messages, between `compute` and `update`.

        It would have to wait for the device there, or the ranks' messages can travel during the update (on the CPU).
        Else the host is ahead of the GPU, and has the update to issue first.
        """
        return self.job.strategy.facts.waits_in_backward or self.job.world.device.type == "cpu"

    def update(self, phases: Phases) -> None:
        """Clip and update, with gradients that are complete; the device may still work on it afterwards."""
        job, request = self.job, StepRequest(self.job.config, self.job.blocks)
        self.output = update(job.strategy, phases, self.loss_sum, self._turns, job.world.device, request)

    def begin_agreement(self) -> None:
        """Begin the step's one reduction, with the loss and the calls of blocks; waits for the loss alone."""
        self.reduction.add("loss", [self.loss_sum.item()], self._set_loss)
        self.reduction.add("calls", self.job.calls.flags(), self.job.calls.agree)
        self.reduction.begin()

    def _set_loss(self, sums: Sequence[float]) -> None:
        loss = sums[0] / self.job.world.tp / max(self.n_targets, 1.0)
        self.loss = loss if math.isfinite(loss) else math.nan

    def busy_s(self) -> float:
        """Seconds of forward without its waits for other ranks; NaN if they were not watched."""
        return self.output.busy_s(self.gather_waits)

    def refuse_bad_loss(self) -> None:
        """End the run if the loss is not finite on some rank; collective then."""
        if not math.isfinite(self.loss):
            losses: list[Any] = self.job.world.gather(self.loss_sum.item())
            bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
            ranks = ", ".join(map(str, bad_ranks)) or "none alone, but their sum is"
            raise TrainingError(
                f"the loss is not finite at step {self.number} on rank {ranks} "
                f"(summed loss {[losses[rank] for rank in bad_ranks][:4]})",
                "lower optim.lr, set train.max_norm, or look at that step's data; nothing after it was saved",
            )

    def figures(self) -> dict[str, float]:
        """The update's figures for the step's record, once they have arrived; `skipped: 1` where nothing was updated.

        End the run if the gradient's norm is not finite, unless loss scaling skips such an update; collective then.
        """
        figures = {name: figure.item() for name, figure in self.output.figures.items()}
        if self.job.config.precision.mode == "fp16":
            figures |= {"loss_scale": self.job.strategy.loss_scale(), "skipped": float(not self.output.updated)}
        elif not math.isfinite(figures["grad_norm"]):
            raise not_finite_gradient(self)
        return figures


_LOG = logging.getLogger(__name__)


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
                job.strategy, job.ledger, step.micro_batches, step.loss_fn, step.n_targets, world.loss_size,
                world.device,
            )  # fmt: skip
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
