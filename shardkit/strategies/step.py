"""One optimizer step and its times: micro-batches forward and backward, the loss normalised by the step's targets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..errors import ConfigError
from ..memory.probe import Phases
from ..parallel.blocks import release_graph_outputs
from ..parallel.optim import by_mesh
from ..parallel.precision import to_device
from . import Strategy
from .base import StepRequest, Update

# Clocks of a device that works on its own: none of them waits for it until its figure is read.

Loss = TypeVar("Loss")


class Mark:
    """A moment: on a GPU the end of all work issued so far, on the CPU now. `later - earlier` is in seconds.

    `time.perf_counter` would give the moment at which the host has issued the work, long before a GPU has done it.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._time = time.perf_counter()
        self._is_past = device.type != "cuda"
        if not self._is_past:
            self._event = torch.Event(device, enable_timing=True)  # a quarter of the cost of torch.cuda.Event
            self._event.record()

    def wait(self) -> Mark:
        """Wait until the moment has come; returns this mark."""
        if not self._is_past:
            self._event.synchronize()
        return self.past()

    def past(self) -> Mark:
        """Declare that the moment is past, because a later one is: `wait` then returns at once. Returns this mark."""
        self._is_past = True
        return self

    def __sub__(self, earlier: Mark) -> float:
        if self._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1000


class HostValue:
    """A 0-d device tensor on its way to the host; reading it waits for the copy only, not for later work of the device.

    `arrived` marks the end of the copy on the device; `time.perf_counter` would mark its launch.
    """

    _free: ClassVar[dict[torch.dtype, list[torch.Tensor]]] = {}
    """Pool of pinned scalars. Allocating a new one makes torch's pinned-memory allocator poll every copy in flight."""

    def __init__(self, value: torch.Tensor, device: torch.device | None = None) -> None:
        """Begin the copy; `arrived` is a moment of `device`, by default the device of the value."""
        self._number: float | None = None
        self._host = value = value.detach()
        self._pool = list[torch.Tensor]()
        if value.device.type == "cuda":
            if type(value) is torch.Tensor:  # not a plan's fake one
                self._pool = self._free.setdefault(value.dtype, self._pool)
            self._host = self._pool.pop() if self._pool else torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
        self.arrived = Mark(device or value.device)  # the moment at which the value is on the host

    def item(self) -> float:
        if self._number is None:
            self.arrived.wait()
            self._number = float(self._host)
            self._pool.append(self._host)
        return self._number


class Stopwatch:
    """Seconds that a device spends between `start` and `stop`, summed over all such pairs.

    Differences of `time.perf_counter` would be the host's time to launch the work, and to wait for it after each pair
    would stop the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Mark, Mark]] = []

    def start(self) -> None:
        self._began = Mark(self._device)

    def stop(self, at: Mark | None = None) -> None:
        """End the span that `start` began, at a mark (default: now)."""
        self._spans.append((self._began, at or Mark(self._device)))

    def seconds(self) -> float:
        """The sum of all spans; waits until the last one has ended."""
        for _, end in self._spans[-1:]:
            end.wait()
        return float(sum(end - begin for begin, end in self._spans))


class GatherWaits:
    """Seconds that forward waits for other ranks, where an engine gathers parameters before a module's forward.

    The device waits, not the host, which `time.perf_counter` would time: a watched step has a hook before and a hook
    after the engine's own on each such module, and both mark moments of the device. `modules`: the modules whose
    parameters are gathered; empty if the engine gathers none in forward, `None` if the waits cannot be told from
    forward.
    """

    def __init__(self, modules: Sequence[nn.Module] | None, device: torch.device) -> None:
        self._modules, self._device = modules, device
        self._in_forward = False

    def around(self, loss: Callable[..., Loss]) -> Callable[..., Loss]:
        """The loss function, with its calls marked as forward: recomputation in backward is not counted."""

        def counted(*args: Any) -> Loss:
            self._in_forward = True
            try:
                return loss(*args)
            finally:
                self._in_forward = False

        return counted

    @contextmanager
    def watching(self, due: bool) -> Iterator[Stopwatch | None]:
        """Watch the step inside if it is due, or if watching costs nothing; yields the waits' stopwatch, or `None`."""
        if self._modules is None or (self._modules and not due):
            yield None
            return
        waits = Stopwatch(self._device)

        def edge(turn: Callable[[], None]) -> Callable[..., None]:
            return lambda *_: turn() if self._in_forward else None

        hooks = [module.register_forward_pre_hook(edge(waits.start), prepend=True) for module in self._modules]
        hooks += [module.register_forward_pre_hook(edge(waits.stop)) for module in self._modules]
        try:
            yield waits
        finally:
            for hook in hooks:
                hook.remove()


MicroBatch = tuple[Any, bool]
"""(the loss function's batch, whether it is a filler of weight 0 on a rank without samples)."""


@dataclass(frozen=True)
class StepOutput:
    """One rank's results of a step, still on their way from the device."""

    loss_sum: HostValue  # this rank's summed loss, before division by the global target count
    updated: bool  # False if loss scaling skipped the update
    # the moments at which each micro-batch's forward and its backward begin, alternating, and then the update
    turns: list[Mark]
    ended: Mark  # the end of the update
    figures: dict[str, HostValue]  # by name: `grad_norm`, and what else is measured in the update

    def arrived(self) -> StepOutput:
        """Declare that the device has ended this step, as it has ended later work: reading waits for nothing then."""
        self.ended.past()
        for value in self.figures.values():
            value.arrived.past()
        return self

    @cached_property
    def forward_s(self) -> float:
        """Seconds of forward over all micro-batches, once the loss is known."""
        return sum((end - begin for begin, end in zip(self.turns[:-1:2], self.turns[1::2], strict=True)), 0.0)

    def busy_s(self, waits: Stopwatch | None) -> float:
        """Seconds of forward that this rank did not wait for others; NaN if its waits are not known."""
        return math.nan if waits is None else self.forward_s - waits.seconds()

    def times(self, elsewhere_s: float = 0.0) -> dict[str, float]:
        """Seconds of forward, backward and update, which follow one another without gaps, once `ended` is past.

        `elsewhere_s`: seconds between the first forward and the update that belong to none of them.
        """
        forward, update = self.forward_s, self.turns[-1]
        backward = update - self.turns[0] - forward - elsewhere_s
        return {"forward_s": forward, "backward_s": backward, "update_s": self.ended - update}


def train_step(
    strategy: Strategy,
    ledger: Phases,
    micro_batches: Sequence[MicroBatch],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    n_targets: float,
    world_size: int,
    device: torch.device,
    request: StepRequest,
) -> StepOutput:
    """Take one optimizer step: forward and backward of its micro-batches, then the update."""
    loss_sum, turns = accumulate(strategy, ledger, micro_batches, loss_fn, n_targets, world_size, device)
    return update(strategy, ledger, loss_sum, turns, device, request)


def accumulate(
    strategy: Strategy,
    ledger: Phases,
    micro_batches: Sequence[MicroBatch],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    n_targets: float,
    world_size: int,
    device: torch.device,
) -> tuple[HostValue, list[Mark]]:
    """Forward and backward of a step's micro-batches; returns this rank's summed loss, and where each of them begins.

    The gradients are those of (sum of the loss over all ranks and micro-batches) / `n_targets`: engines average over
    ranks, hence each rank's sum is scaled once, in fp32, by world_size / n_targets. A mean of per-micro-batch means
    would weigh ragged micro-batches wrongly.
    """
    release_graph_outputs()
    scale = world_size / max(n_targets, 1.0)
    total: torch.Tensor | None = None
    turns: list[Mark] = []
    for index, (batch, is_filler) in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with strategy.accumulate(is_last):
            with ledger.phase("forward", follows=index > 0):
                turns.append(Mark(device))
                loss = one_number(loss_fn(strategy.model, to_device(batch, device)))
                weight = 0.0 if is_filler else 1.0
                seen = loss.detach()
                if is_filler or (total is None and not is_last):
                    seen = seen * weight  # a copy: a captured graph writes the next loss to the same memory
                total = seen if total is None else total + seen
                if is_last:
                    loss_sum = HostValue(total)
                turns.append(loss_sum.arrived if is_last else Mark(device))
            with ledger.phase("backward", follows=True):
                strategy.backward(loss * (weight * scale))
                del loss
    return loss_sum, turns


def update(
    strategy: Strategy, ledger: Phases, loss_sum: HostValue, turns: list[Mark], device: torch.device,
    request: StepRequest,
) -> StepOutput:  # fmt: skip
    """Complete the gradients of `accumulate`, clip and update."""
    if strategy.facts.waits_in_backward:
        with ledger.phase("backward"):
            strategy.finish_backward()
    turns.append(Mark(device))
    ledger.sample_state(strategy)
    with ledger.phase("update", follows=True):  # what `sample_state` counts takes no memory to speak of
        # Here `strategy.gradient` has the complete gradients of every engine; `step` clears them.
        done = strategy.step(request)
        ended = Mark(device)
        figures = {"grad_norm": done.grad_norm, **done.figures}
        on_host = {name: HostValue(figure, device) for name, figure in figures.items()}
    return StepOutput(loss_sum, done.updated, turns, ended, on_host)


def one_number(loss: Any) -> torch.Tensor:
    """A loss function's result in fp32."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss.float()
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise ConfigError(
        f"the loss function returned {kind}, not one number (a tensor without dimensions)",
        "return the loss summed over the batch's targets, for example loss.sum()",
    )


def total_norm(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The 2-norm of gradients over all ranks; elements that several ranks hold alike count once."""
    norms = [_norm(members) for members in by_mesh(gradient for gradient in gradients if gradient is not None)]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


def _norm(gradients: Sequence[Any]) -> torch.Tensor:
    """The 2-norm of gradients that are cut along the same dimensions of one mesh, if along any."""
    cut = [dim for dim, at in enumerate(getattr(gradients[0], "placements", ())) if not at.is_replicate()]
    if len(cut) > 1:  # torch would warn on every rank that it reduces one dimension after the other
        squared = nn.utils.get_total_norm([gradient.to_local() for gradient in gradients]).square()
        for dim in cut:
            dist.all_reduce(squared, group=gradients[0].device_mesh.get_group(dim))
        return squared.sqrt()
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # a DTensor's class takes 0.4 s to import


def clip_and_step(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    request: StepRequest,
    unused: Iterable[nn.Parameter] = (),
) -> Update:
    """Unscale, clip the total 2-norm over all ranks, update, drop gradients.

    With loss scaling, a gradient that is not finite on any rank makes all ranks skip the update. `parameters`: all of
    the model's. A list, because walking through the modules takes a large model's host 1 ms. `unused`: parameters that
    are not updated. They have gradients of zero, so that ranks that disagree about them still compute the norm of the
    same tensors.
    """
    scaler.unscale_(optimizer)
    grads = [p.grad for p in parameters]  # until the update has ended: each access makes a new Python object
    norm = total_norm(grads)
    if (max_norm := request.config.train.max_norm) is not None:
        for members in by_mesh(parameters):
            nn.utils.clip_grads_with_norm_(members, max_norm, norm)
    for param in unused:
        param.grad = None
    updated = True
    if scaler.is_enabled():
        # The scale, for which the host waits, tells whether the optimizer was let: it falls after a skipped step only.
        # A norm that is not finite does not tell, since finite gradients may have one. `GradScaler.step` returns `None`
        # for both, and fused optimizers skip the update on the device.
        scale_before = scaler.scale(norm.new_ones(()))
        scaler.step(optimizer)
        scaler.update()
        updated = not bool(scaler.scale(norm.new_ones(())) < scale_before)
    else:
        # On the CPU the norm is known. On a GPU torch's fused optimizers read a flag on the device. Other optimizers
        # update there in any case, and the resulting state must not be saved.
        zero = norm * 0  # inf · 0 is NaN, which differs from 0; isfinite would launch three more kernels
        if norm.device.type != "cpu":
            with skipping(optimizer, zero.ne_(0)):
                optimizer.step()
        elif not zero.ne(0):
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(norm, updated)


@contextmanager
def skipping(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> Iterator[None]:
    """Inside this context a step of torch's fused optimizers does nothing if `bad`, which the device reads, is true."""
    if not all(group.get("fused") for group in optimizer.param_groups):
        yield
        return
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # the attribute that GradScaler sets as well
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
