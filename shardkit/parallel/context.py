"""Context parallelism: the ranks of a group hold parts of the same sequences, and exchange heads for positions around
attention (Ulysses: Jacobs et al. 2023, section 3).

A rank holds every `size`-th position, so that a group's targets are spread evenly wherever they stand in a sequence.
For attention an all-to-all gives each rank all positions of a share of the heads, and another one gives them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError
from .compat import all_to_all

ATTRIBUTE = "context_parallel"
"""A module that declares this attribute (as None) computes attention for parts of sequences: it gets a
`ContextParallel` there."""


@dataclass(frozen=True)
class Part:
    """Which part of each sequence a rank holds: the positions rank, rank + size, rank + 2 · size, …"""

    rank: int = 0
    size: int = 1

    def of(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's positions along `dim`, whose length is a multiple of `size`; contiguous."""
        length = tensor.shape[dim]
        if length % self.size:
            raise ValueError(f"{length} positions are no multiple of parallel.cp={self.size}")
        indices = torch.arange(self.rank, length, self.size, device=tensor.device)
        return tensor.index_select(dim, indices)


class ContextParallel:
    """The exchange of heads for positions within this rank's group."""

    def __init__(self, part: Part, group: dist.ProcessGroup) -> None:
        self.part, self.size, self._group = part, part.size, group
        self.active = True  # False while ranks compute whole sequences of their own

    def to_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """From [rows, T / size, heads, width], a rank's positions, to [rows, T, heads / size, width]; differentiable.

        Heads of keys or values that are fewer than `size`, or no multiple of it, are repeated as often as it takes:
        each is shared by a group of query heads, which then shares its copies.
        """
        if not self.active:
            return tensor
        copies = self.size // math.gcd(tensor.shape[2], self.size)
        if copies > 1:
            tensor = tensor.repeat_interleave(copies, 2)
        rows, length, heads, width = tensor.shape
        parts = tensor.view(rows, length, self.size, heads // self.size, width).permute(2, 0, 1, 3, 4)
        received = all_to_all(parts.contiguous(), self._group)  # [rank of the positions, rows, T / size, heads, width]
        return received.permute(1, 2, 0, 3, 4).reshape(rows, length * self.size, heads // self.size, width)

    def to_positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_heads`: from [rows, T, heads / size, width] to [rows, T / size, heads, width]."""
        if not self.active:
            return tensor
        rows, length, heads, width = tensor.shape
        parts = tensor.reshape(rows, length // self.size, self.size, heads, width).permute(2, 0, 1, 3, 4)
        received = all_to_all(parts.contiguous(), self._group)  # [rank of the heads, rows, T / size, heads, width]
        return received.permute(1, 2, 0, 3, 4).reshape(rows, length // self.size, heads * self.size, width)

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Let attention work without the group: every rank computes whole sequences of its own."""
        self.active, before = False, self.active
        try:
            yield
        finally:
            self.active = before


def new_group(rank: int, world_size: int, size: int) -> ContextParallel | None:
    """This rank's group, of `size` neighbouring ranks; collective. None if sequences are whole."""
    if size == 1:
        return None
    groups = [list(range(first, first + size)) for first in range(0, world_size, size)]
    group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    assert group is not None
    return ContextParallel(Part(rank % size, size), group)


def check_heads(heads: int, size: int, key: str) -> None:
    """Refuse heads of attention that cannot be dealt out to `parallel.cp` ranks evenly."""
    if heads % size:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"parallel.cp={size} does not divide {key}={heads}: each rank computes attention for its share of the heads",
            f"set parallel.cp to one of {', '.join(map(str, fits))}",
        )


def split_sequences(model: nn.Module, context: ContextParallel | None) -> None:
    """Give each attention module that can work on parts of sequences its group."""
    if context is None:
        return
    modules = [module for module in model.modules() if hasattr(module, ATTRIBUTE)]
    if not modules:
        raise ConfigError(
            f"parallel.cp={context.size}: no module of {type(model).__name__} knows how to compute attention for a part "
            f"of a sequence (none has an attribute {ATTRIBUTE})",
            "remove parallel.cp, or add the hook of docs/long.md to its attention",
        )
    for module in modules:
        setattr(module, ATTRIBUTE, context)
