"""Context parallelism: the ranks of a group hold parts of the same sequences, and exchange heads for positions around
attention (Ulysses: Jacobs et al. 2023, section 3).

A rank holds every `size`-th position, so that a group's targets are spread evenly wherever they stand in a sequence.
For attention an all-to-all gives each rank all positions of a share of the heads, and another one gives them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError
from .compat import all_to_all

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ATTRIBUTE = "context_parallel"
"""A module that declares this attribute (as None) computes attention for parts of sequences: it gets a
`ContextParallel` there."""


class ContextParallel:
    """The exchange of heads for positions within this rank's group."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.group = rank, size, group
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
        received = all_to_all(parts.contiguous(), self.group)  # [rank of the positions, rows, T / size, heads, width]
        return received.permute(1, 2, 0, 3, 4).reshape(rows, length * self.size, heads // self.size, width)

    def to_positions(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_heads`: from [rows, T, heads / size, width] to [rows, T / size, heads, width]."""
        if not self.active:
            return tensor
        rows, length, heads, width = tensor.shape
        parts = tensor.reshape(rows, length // self.size, self.size, heads, width).permute(2, 0, 1, 3, 4)
        received = all_to_all(parts.contiguous(), self.group)  # [rank of the heads, rows, T / size, heads, width]
        return received.permute(1, 2, 0, 3, 4).reshape(rows, length // self.size, heads * self.size, width)

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """The share of [heads, …] that belongs to the heads of this rank."""
        return values.chunk(self.size)[self.rank] if self.active else values

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Let attention work without the group: every rank computes whole sequences of its own."""
        self.active, before = False, self.active
        try:
            yield
        finally:
            self.active = before


def new_group(rank: int, world_size: int, size: int) -> ContextParallel:
    """This rank's group, of `size` neighbouring ranks; collective."""
    groups = [list(range(start, start + size)) for start in range(0, world_size, size)]
    group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    assert group is not None
    return ContextParallel(rank % size, size, group)


def split_sequences(model: nn.Module, context: ContextParallel) -> None:
    """Give each attention module that can work on parts of sequences its group."""
    modules = [module for module in model.modules() if hasattr(module, ATTRIBUTE)]
    if not modules:
        raise ConfigError(
            f"parallel.cp={context.size}: no module of {type(model).__name__} can compute attention for a part of a "
            f"sequence (none has an attribute {ATTRIBUTE})",
            "remove parallel.cp, or add the hook of docs/long.md to its attention",
        )
    mixing = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    if mixing:
        raise ConfigError(
            f"parallel.cp={context.size}: {mixing[0]} is a batch norm, which would see a part of each sequence",
            "remove parallel.cp, or use another norm",
        )
    for module in modules:
        setattr(module, ATTRIBUTE, context)
