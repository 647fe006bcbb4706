"""One optimizer step: micro-batches forward and backward, the loss normalised by the step's global target count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..memory.phases import Phases
from . import Strategy

MicroBatch = tuple[Any, bool]
"""What the loss function takes, and whether it is a filler: a stand-in of weight 0 on a rank without samples."""


class HostValue:
    """A 0-d device tensor on its way to the host; reading waits for that copy only, not for later work."""

    def __init__(self, value: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = value.detach()
        if value.device.type == "cuda":
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def item(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)


class Stopwatch:
    """Time that a device spends on something that recurs; reading waits for nothing but the last `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._began: Any = None

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self._spans.append((self._began, self._now()))

    def seconds(self) -> float:
        if not self._on_cuda:
            return float(sum(end - begin for begin, end in self._spans))
        self._spans[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._spans)) / 1000


@dataclass(frozen=True)
class StepOutput:
    """What one rank knows after a step, still on its way from the device.

    Attributes:
        loss_sum: this rank's summed loss, before division by the global target count.
        grad_norm: global gradient norm before clipping.
        forward: time in forward, all micro-batches.
    """

    loss_sum: HostValue
    grad_norm: HostValue
    forward: Stopwatch


def train_step(
    strategy: Strategy,
    ledger: Phases,
    micro_batches: Sequence[MicroBatch],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    n_targets: float,
    world_size: int,
    device: torch.device,
    max_norm: float | None,
) -> StepOutput:
    """Accumulate, clip, update.

    Gradients equal those of (sum of the loss over all ranks and micro-batches) / `n_targets`: engines average over
    ranks, so each rank's sum is scaled by world_size / n_targets, once, in fp32. A mean of per-micro-batch means would
    weigh ragged micro-batches wrongly.
    """
    scale = world_size / max(n_targets, 1.0)
    total = torch.zeros((), dtype=torch.float32, device=device)
    forward = Stopwatch(device)
    for index, (batch, is_filler) in enumerate(micro_batches):
        with strategy.accumulate(is_last=index == len(micro_batches) - 1):
            with ledger.phase("forward"):
                forward.start()
                loss = loss_fn(strategy.model, to_device(batch, device)).float()
                weight = 0.0 if is_filler else 1.0
                total += loss.detach() * weight
                if index == len(micro_batches) - 1:
                    loss_sum = HostValue(total)
                forward.stop()
            with ledger.phase("backward"):
                strategy.backward(loss * (weight * scale))
                del loss
    ledger.sample_state(strategy)
    with ledger.phase("step"):
        grad_norm = HostValue(strategy.step(max_norm))
    return StepOutput(loss_sum, grad_norm, forward)


def clip_and_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, max_norm: float | None
) -> torch.Tensor:
    """Unscale, clip the total 2-norm, update, drop gradients; the norm before clipping, 0-d (a DTensor for shards).

    With loss scaling, a gradient that is not finite on any rank skips the update on all, and the norm is not finite.
    """
    scaler.unscale_(optimizer)
    params = [p for p in model.parameters() if p.grad is not None]
    if max_norm is not None:
        norm = nn.utils.clip_grad_norm_(params, max_norm)
    else:
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device` (asynchronously from pinned memory)."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
