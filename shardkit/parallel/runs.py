"""Which elements of a flattened tensor a rank holds: runs of equal length, equally far apart. Imports no torch.

A tensor that is cut along its first dimension is one run. Cut along an inner dimension (columns of tensor parallelism,
rows of each expert), a rank's part is a run in each row. Two numbers beside the start describe that, however many runs
there are; a list would have millions of entries for a model of 8 B parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import ConfigError


class RunBlock(NamedTuple):
    """Equal parts of consecutive runs: `rows` of them, `width` elements each."""

    offset: int  # index of the first element among those of all runs
    start: int  # index of the first element in the flattened tensor; those of the next rows are `stride` further each
    rows: int
    width: int


class Runs(NamedTuple):
    """`length` elements of a flattened tensor, in runs of `run` that begin `stride` apart; `run` 0: a single run."""

    start: int
    length: int
    run: int = 0
    stride: int = 0

    def below(self, element: int) -> int:
        """How many of the elements lie before `element` of the flattened tensor."""
        distance = max(element - self.start, 0)
        if not self.run:
            return min(distance, self.length)
        row, column = divmod(distance, self.stride)
        return min(row * self.run + min(column, self.run), self.length)

    def blocks(self, low: int, high: int) -> Iterator[RunBlock]:
        """Cut the elements [low, high) of the runs into at most three blocks: the rest of a run, whole runs, and the
        beginning of a run."""
        run = self.run or max(self.length, 1)
        while low < high:
            row, column = divmod(low, run)
            has_whole_runs = not column and high - low >= run
            rows, width = ((high - low) // run, run) if has_whole_runs else (1, min(run - column, high - low))
            yield RunBlock(low, self.start + row * self.stride + column, rows, width)
            low += rows * width


def runs_of(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]) -> Runs:
    """The elements of a tensor that a rank of a mesh holds.

    `placements`: a DTensor's, one for each dimension of the mesh. Every dimension of the tensor is cut as `torch.chunk`
    cuts it.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    # FSDP2 cuts what tensor or expert parallelism has left of the same dimension, although its dimension of the mesh
    # comes before theirs: its placement then has a `split_factor`.
    axes = sorted(range(len(mesh)), key=lambda axis: hasattr(placements[axis], "split_factor"))
    for axis in axes:
        dim = getattr(placements[axis], "dim", None)  # replicas have none
        if dim is not None:
            size = -(-sizes[dim] // mesh[axis])
            begin = min(coordinate[axis] * size, sizes[dim])
            offsets[dim], sizes[dim] = offsets[dim] + begin, min(size, sizes[dim] - begin)
    if 0 in sizes:
        return Runs(0, 0)
    inner = len(shape)  # the dimensions from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    run = math.prod(sizes[inner - 1 :]) if inner else math.prod(sizes)
    outer = [dim for dim in range(inner - 1) if sizes[dim] > 1]
    if any(strides[left] != strides[right] * sizes[right] for left, right in pairwise(outer)):
        raise ConfigError(
            f"a tensor of shape {list(shape)} is cut along more than one inner dimension, as {list(placements)}",
            "cut the first dimension and one more at most: a checkpoint describes a part by one distance",
        )
    length = math.prod(sizes)
    return Runs(start, length, run, strides[outer[-1]]) if outer else Runs(start, length)
