"""One optimizer step, taken in the same way by the training loop and by `Job.step`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..memory.phases import Phases
from ..strategies.base import StepRequest
from ..strategies.clocks import HostValue, Mark, Stopwatch
from ..strategies.step import MicroBatch, StepOutput, accumulate, update
from .agreement import Reduction
from .not_finite import not_finite_gradient, not_finite_loss

if TYPE_CHECKING:
    from .job import Job


@dataclass(kw_only=True)
class OptimizerStep:
    """One optimizer step over this rank's micro-batches.

    `compute` its gradients, `update` the weights, begin the agreement on the step between the two or after them.
    `refuse_bad_loss` and `finite_norm` end the run before anything is saved.

    Attributes:
        number: the first step is 1.
        micro_batches: this rank's.
        n_targets: target tokens of all ranks.
        loss_fn: (model, batch) → the loss summed over the batch's targets.
        reduction: the ranks' agreement on this step; others may add their parts until it begins.
        loss_sum: this rank's summed loss, once its gradients are computed.
        output: this rank's results, once the step is taken.
        gather_waits: the waits of forward for other ranks; `None` if they are not watched in this step.
        loss: mean over the targets of all ranks; NaN before the ranks agree, and if it is not finite.
    """

    job: Job
    number: int
    micro_batches: Sequence[MicroBatch]
    n_targets: float
    loss_fn: Callable[[Any, Any], torch.Tensor]
    reduction: Reduction = field(init=False)
    loss_sum: HostValue = field(init=False)
    output: StepOutput = field(init=False)
    gather_waits: Stopwatch | None = field(init=False, default=None)
    _turns: list[Mark] = field(init=False)
    loss: float = field(init=False, default=math.nan)

    def __post_init__(self) -> None:
        self.reduction = Reduction(self.job.world)

    def compute(self, phases: Phases, watches_gathers: bool) -> None:
        """Forward and backward of all micro-batches; the device may still work on them afterwards.

        Args:
            phases: where the memory of the step's phases is accounted.
            watches_gathers: whether to time forward's waits for other ranks, even if that costs something.
        """
        job, world = self.job, self.job.world
        with job.calls.waits.watching(watches_gathers) as self.gather_waits:
            self.loss_sum, self._turns = accumulate(
                job.strategy, phases, self.micro_batches, self.loss_fn, self.n_targets, world.size, world.device
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
        request = StepRequest(max_norm=self.job.config.train.max_norm)
        device = self.job.world.device
        self.output = update(self.job.strategy, phases, self.loss_sum, self._turns, device, request)

    def begin_agreement(self) -> None:
        """Begin the step's one reduction, with the loss and the calls of blocks; waits for the loss alone."""
        self.reduction.add("loss", [self.loss_sum.item()], self._set_loss)
        self.reduction.add("calls", self.job.calls.flags(), self.job.calls.agree)
        self.reduction.begin()

    def _set_loss(self, sums: Sequence[float]) -> None:
        loss = sums[0] / max(self.n_targets, 1.0)
        self.loss = loss if math.isfinite(loss) else math.nan

    def busy_s(self) -> float:
        """Seconds of forward without its waits for other ranks; NaN if they were not watched."""
        return self.output.busy_s(self.gather_waits)

    def refuse_bad_loss(self) -> None:
        """End the run if the loss is not finite on some rank; collective then.

        Raises:
            TrainingError: names the ranks.
        """
        if not math.isfinite(self.loss):
            raise not_finite_loss(self.job.world, self.number, self.loss_sum.item())

    def finite_norm(self) -> float:
        """The norm of the gradient, once it has arrived; infinite or NaN only if loss scaling skipped the update.

        Raises:
            TrainingError: the gradient is not finite; names the ranks and parameters. Collective then.
        """
        norm = self.output.grad_norm.item()
        if not math.isfinite(norm) and self.job.config.precision.mode != "fp16":
            raise not_finite_gradient(self)
        return norm
