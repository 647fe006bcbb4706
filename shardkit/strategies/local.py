"""What single and ddp share: every rank holds whole parameters and whole optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from .base import Shard
from .states import buffer_shards, flat, scalars_of, set_scalars, state_parts


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


def even_range(numel: int, part: int, parts: int) -> tuple[int, int]:
    """Start and end of one of `parts` nearly equal ranges of `numel` elements."""
    return numel * part // parts, numel * (part + 1) // parts


def local_shards(model: nn.Module, optimizer: torch.optim.Optimizer, part: int, parts: int) -> Iterator[Shard]:
    """This rank's share of state that every rank holds whole: one of `parts` even ranges of each tensor."""
    for fqn, param in model.named_parameters():
        shape = tuple(param.shape)
        start, end = even_range(param.numel(), part, parts)
        yield Shard(f"model.{fqn}", shape, start, flat(fqn, param)[start:end])
        for key, value in state_parts(optimizer.state.get(param, {})):
            first, last = even_range(value.numel(), part, parts)
            yield Shard(f"optim.{fqn}.{key}", tuple(value.shape), first, flat(fqn, value)[first:last])
    yield from buffer_shards(model, part)


SCALE = "engine.loss_scaler.cur_scale"
_GROWTH = "engine.loss_scaler.growth_tracker"


def local_scalars(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, elementwise: bool = False
) -> dict[str, float]:
    """Single numbers in the states of an optimizer over the model's own parameters, and of the loss scaler.

    Args:
        elementwise: refuse states that are not one value per element of their parameter: each rank holds a piece.
    """
    found: dict[str, float] = {}
    if scaler.is_enabled():
        found = {SCALE: scaler.get_scale(), _GROWTH: scaler.state_dict()["_growth_tracker"]}
    for fqn, param in model.named_parameters():
        found |= scalars_of(fqn, param, optimizer.state.get(param, {}), elementwise)
    return found


def load_local_scalars(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, scalars: Mapping[str, float]
) -> None:
    """Put saved numbers back into those states (a run that had no loss scaler leaves the fresh one)."""
    if scaler.is_enabled() and SCALE in scalars:
        saved = {"scale": scalars[SCALE], "_growth_tracker": int(scalars.get(_GROWTH, 0))}
        scaler.load_state_dict({**scaler.state_dict(), **saved})
    for fqn, param in model.named_parameters():
        set_scalars(fqn, optimizer.state.get(param, {}), scalars)
