"""One optimizer step: micro-batches forward and backward, the loss normalised by the step's global target count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .memory.ledger import MemoryLedger
from .strategies import Strategy

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


@dataclass(frozen=True)
class StepOutput:
    """What one rank knows after a step, still on its way from the device.

    Attributes:
        loss_sum: this rank's summed loss, before division by the global target count.
        grad_norm: global gradient norm before clipping.
    """

    loss_sum: HostValue
    grad_norm: HostValue


def train_step(
    strategy: Strategy,
    ledger: MemoryLedger,
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
    for index, (batch, is_filler) in enumerate(micro_batches):
        with strategy.accumulate(is_last=index == len(micro_batches) - 1):
            with ledger.phase("forward"):
                loss = loss_fn(strategy.model, to_device(batch, device)).float()
                weight = 0.0 if is_filler else 1.0
                total += loss.detach() * weight
                if index == len(micro_batches) - 1:
                    loss_sum = HostValue(total)
            with ledger.phase("backward"):
                strategy.backward(loss * (weight * scale))
                del loss
    ledger.sample_state(strategy)
    with ledger.phase("step"):
        grad_norm = HostValue(strategy.step(max_norm))
    return StepOutput(loss_sum, grad_norm)


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
