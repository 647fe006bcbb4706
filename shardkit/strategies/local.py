"""What single and ddp share: every rank holds whole parameters and whole optimizer states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from .base import Shard
from .states import buffer_shards, flat, scalars_of, set_scalars


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None) -> torch.Tensor:
    """Clip the total 2-norm, update, drop gradients; the norm before clipping, 0-d (a DTensor for shards)."""
    params = [p for p in model.parameters() if p.grad is not None]
    if max_norm is not None:
        norm = nn.utils.clip_grad_norm_(params, max_norm)
    else:
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    optimizer.step()
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
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                yield Shard(f"optim.{fqn}.{key}", shape, start, flat(fqn, value)[start:end])
    yield from buffer_shards(model, part)


def local_scalars(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Single numbers in the states of an optimizer over the model's own parameters."""
    found: dict[str, float] = {}
    for fqn, param in model.named_parameters():
        found |= scalars_of(fqn, param, optimizer.state.get(param, {}))
    return found


def load_local_scalars(model: nn.Module, optimizer: torch.optim.Optimizer, scalars: Mapping[str, float]) -> None:
    """Put saved numbers back into those states."""
    for fqn, param in model.named_parameters():
        set_scalars(fqn, optimizer.state.get(param, {}), scalars)
