"""Context parallelism: the ranks of a group hold parts of the same sequences, and exchange heads for positions around
attention (Ulysses: Jacobs et al. 2023, section 3).

A rank holds every `size`-th position, so that a group's targets are spread evenly wherever they stand in a sequence.
For attention an all-to-all gives each rank all positions of a share of the heads, and another one gives them back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError
from .compat import all_to_all
from .precision import tensors_of

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_UNSPLIT = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d)
"""Modules of torch that mix positions and know no groups; a convolution of one position mixes none."""
ATTRIBUTE = "context_parallel"
"""A module that declares this attribute (as None) computes attention for parts of sequences: it gets a
`ContextParallel` there."""


class ContextParallel:
    """The exchange of heads for positions within this rank's group."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.active = True  # False while ranks compute whole sequences of their own
        self.is_used = False  # whether attention has exchanged heads
        self.is_checked = False  # whether the ranks' parts of a batch were compared
        self.n_repeated = 0  # bytes of the largest keys that a rank holds beyond its share, as heads are too few

    def to_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """From [rows, T / size, heads, width], a rank's positions, to [rows, T, heads / size, width]; differentiable.

        Heads of keys or values that are fewer than `size`, or no multiple of it, are repeated as often as it takes:
        each is shared by a group of query heads, which then shares its copies.
        """
        if not self.active:
            return tensor
        copies = self.size // math.gcd(tensor.shape[2], self.size)
        if not torch.compiler.is_compiling():  # compiled code would be made anew for each value
            self.is_used = True
            self.n_repeated = max(self.n_repeated, (copies - 1) * tensor.nbytes)
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


def split_sequences(model: nn.Module, context: ContextParallel) -> None:
    """Give each attention module that can work on parts of sequences its group."""
    modules = [module for module in model.modules() if hasattr(module, ATTRIBUTE)]
    if not modules:
        raise ConfigError(
            f"parallel.cp={context.size}: no module of {type(model).__name__} can compute attention for a part of a "
            f"sequence (none has an attribute {ATTRIBUTE})",
            "remove parallel.cp, or add the hook of docs/long.md to its attention",
        )
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS):
            raise ConfigError(
                f"parallel.cp={context.size}: {name} is a batch norm, which would see a part of each sequence",
                "remove parallel.cp, or use another norm",
            )
        is_pointwise = isinstance(module, nn.Conv1d) and module.kernel_size == (1,)
        if isinstance(module, _UNSPLIT) and not hasattr(module, ATTRIBUTE) and not is_pointwise:
            raise ConfigError(
                f"parallel.cp={context.size}: {name}, a {type(module).__name__}, mixes positions, and would see a part "
                "of each sequence",
                "remove parallel.cp, or write it with the hook of docs/long.md",
            )
    for module in modules:
        setattr(module, ATTRIBUTE, context)


def digest(batches: Iterable[object]) -> str:
    """A digest of the tensors of [rows, positions, …] whose positions differ; empty if there are none."""
    hashed, is_empty = hashlib.sha256(), True
    for tensor in tensors_of(list(batches)):
        if tensor.dim() > 1 and bool((tensor != tensor[:, :1]).any()):
            hashed.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            is_empty = False
    return "" if is_empty else hashed.hexdigest()


def refuse_whole_sequences(context: ContextParallel, digests: list[object], tp: int) -> None:
    """Refuse a step whose ranks of a group have the same batches. `digests`: of every `tp`-th rank of the world."""
    for start in range(0, len(digests), context.size):
        parts = digests[start : start + context.size]
        if all(parts) and len(set(parts)) == 1:
            raise ConfigError(
                f"parallel.cp={context.size}: ranks {start * tp} to {(start + context.size - 1) * tp} got the same "
                "batch: whole sequences, which attention would take for parts of longer ones",
                "give each rank its part: tensor[:, rank % cp :: cp] of inputs, positions and targets (docs/long.md)",
            )
    context.is_checked = all(digests)
