"""The weight table: a gradient as a weighted sum of each rank's and micro-batch's gradient.

It tells apart what a comparison with one number cannot: micro-batches that do not count, tokens that weigh by rank, a
wrong backward (no weighted sum at all), and rows that act on each other in a batch (one process's gradient is no
weighted sum either).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .compare import Side

ENTRIES = 1_000_000
"""Numbers of the gradients that are fitted, sampled evenly over each parameter."""
MOST_PARTS = 32
"""Ranks times micro-batches above which no table is made: each takes a step of one process."""
NO_WEIGHT = 1e-3
"""The part of the largest weight below which a micro-batch does not count."""
Part = tuple[int, int]


@dataclass(frozen=True)
class WeightTable:
    parts: tuple[Part, ...]  # (rank, micro-batch from 0)
    parallel: tuple[float, ...]
    process: tuple[float, ...]
    remaining: float  # of the parallel gradient's norm, what no weights explain
    process_remaining: float
    rounding: float  # the same of one process with its weights moved by an ulp, times what is allowed
    targets: tuple[int | None, ...] = ()

    @property
    def rows_interact(self) -> bool:
        """Whether rows act on each other in a batch: one process's gradient is not that of its rows."""
        return self.process_remaining > self.rounding

    @property
    def is_weighted_sum(self) -> bool:
        return self.remaining <= max(self.rounding, 1e-4)

    @property
    def is_sum_loss(self) -> bool:
        """Whether one process adds up what ranks average: a loss that is a sum over rows."""
        n_ranks = len({rank for rank, _ in self.parts})  # that have rows of their own
        return n_ranks > 1 and abs(sum(self.process) / n_ranks - 1) < 1e-2

    def lines(self) -> list[str]:
        lines = []
        for (rank, micro), a, b, n in zip(self.parts, self.parallel, self.process, self.targets, strict=True):
            targets = f" ({n} targets)" if n else ""
            a, b = round(a, 4) + 0.0, round(b, 4) + 0.0  # no -0.0000
            lines.append(f"rank {rank} micro-batch {micro + 1}{targets}: parallel {a:+.4f}, one process {b:+.4f}")
        return lines

    def as_json(self) -> dict[str, dict[str, float]]:
        return {
            f"rank {rank} micro-batch {micro + 1}": {"parallel": a, "one process": b}
            for (rank, micro), a, b in zip(self.parts, self.parallel, self.process, strict=True)
        }

    def words(self) -> str:
        """What the weights say; empty if they name nothing."""
        if not self.is_weighted_sum:
            return "no weighted sum of the micro-batches' gradients: wrong inside the backward"
        largest = max(map(abs, self.parallel)) or 1.0
        counted = [part for part, w in zip(self.parts, self.parallel, strict=True) if abs(w) > NO_WEIGHT * largest]
        ranks, ending = sorted({rank for rank, _ in self.parts}), max(micro for _, micro in self.parts)
        if len(counted) < len(self.parts):
            counted_ranks = sorted({rank for rank, _ in counted})
            if ending and all(micro == ending for _, micro in counted) and len(counted_ranks) == len(ranks):
                return "only the last micro-batch of a step counts"
            if ending and all(micro == 0 for _, micro in counted) and len(counted_ranks) == len(ranks):
                return "only the first micro-batch of a step counts"
            if len(counted_ranks) < len(ranks):
                word = "rank" if len(counted_ranks) == 1 else "ranks"
                return f"only the rows of {word} {', '.join(map(str, counted_ranks))} count"
            return "only " + ", ".join(f"rank {rank} micro-batch {micro + 1}" for rank, micro in counted) + " count"
        process = torch.tensor(self.process) / sum(self.process)
        parallel = torch.tensor(self.parallel) / sum(self.parallel)
        per_rank = {
            r: sum(float(w) for (rank, _), w in zip(self.parts, process, strict=True) if rank == r) for r in ranks
        }
        models = {
            "each micro-batch weighs alike, whatever its targets": [1 / len(self.parts) for _ in self.parts],
            "each rank weighs alike, whatever its targets (a mean of the ranks' means)": [
                float(w) / per_rank[rank] / len(ranks) for (rank, _), w in zip(self.parts, process, strict=True)
            ],
            "ranks weigh by their targets, but the micro-batches of a rank alike": [
                per_rank[rank] / (ending + 1) for rank, _ in self.parts
            ],
        }
        for words, weights in models.items():
            if float((parallel - torch.tensor(weights)).abs().max()) < 2e-3:
                return words
        factors = [a / b for a, b in zip(self.parallel, self.process, strict=True) if b]
        by_rank = {rank: [f for (r, _), f in zip(self.parts, factors, strict=False) if r == rank] for rank in ranks}
        if len(factors) == len(self.parts) and all(max(f) - min(f) < 1e-2 * abs(max(f)) for f in by_rank.values()):
            words = ", ".join(f"rank {rank} x{rank_factors[0]:.4g}" for rank, rank_factors in by_rank.items())
            return f"each rank's gradient by another factor: {words}"
        return "the micro-batches weigh differently"


def make(
    parts: Sequence[Part], columns: Sequence[Side | Mapping[str, torch.Tensor]], parallel: Side, process: Side,
    moved: Side | None, allowed: float, targets: Sequence[int | None], shapes: Mapping[str, tuple[int, ...]],
    plain: Mapping[str, torch.Tensor] | None = None,
) -> WeightTable | None:  # fmt: skip
    """Fit both gradients over the parts' own; None if there is nothing to fit.

    `plain`: tensors that take the place of one process's gradient.
    """
    names = [name for name in shapes if all(_has(column, name) for column in (parallel, plain or process, *columns))]
    if not names:
        return None
    matrix = torch.stack([_sampled(column, names, shapes) for column in columns], 1)
    targets_of = {"parallel": _sampled(parallel, names, shapes), "process": _sampled(plain or process, names, shapes)}
    size = float(targets_of["process"].norm()) or 1.0
    nudged = _sampled(moved, names, shapes) if moved is not None and all(_has(moved, name) for name in names) else None
    spread = 0.0 if nudged is None else float((nudged - _sampled(process, names, shapes)).norm()) / size
    fits = {}
    for side, gradient in targets_of.items():
        weights = torch.linalg.lstsq(matrix, gradient[:, None], driver="gelsd").solution[:, 0]
        residual = float((matrix @ weights - gradient).norm()) / (float(gradient.norm()) or 1.0)
        fits[side] = tuple(weights.tolist()), residual
    (a, remaining), (b, process_remaining) = fits["parallel"], fits["process"]
    return WeightTable(tuple(parts), a, b, remaining, process_remaining, max(allowed * spread, 1e-5), tuple(targets))


def _has(column: Side | Mapping[str, Any], name: str) -> bool:
    pieces = column.of(name).values() if isinstance(column, Side) else [column.get(name)]
    return bool(pieces) and all(piece is not None for piece in pieces)


def _sampled(
    column: Side | Mapping[str, torch.Tensor], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> torch.Tensor:
    total = sum(torch.Size(shapes[name]).numel() for name in names)
    stride = max(1, total // ENTRIES)
    parts: list[torch.Tensor] = []
    for name in names:
        tensor = column.full(name, shapes[name])[0] if isinstance(column, Side) else column[name]
        assert tensor is not None, f"the pieces of {name} do not fit"
        parts.append(tensor.reshape(-1)[::stride].double())
    return torch.cat(parts)


def added(side: Side) -> dict[str, torch.Tensor] | None:
    """What the backwards of a step change in the gradients, added up; None where that is not recorded."""
    shares = list(shares_of(side))
    if not shares:
        return None
    total: dict[str, torch.Tensor] = {}
    for share in shares:
        for name, tensor in share.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return total


def shares_of(side: Side) -> Iterator[dict[str, torch.Tensor]]:
    """Each backward's own change of one process's gradients."""
    from .inject import shardkit_pieces

    numbers = partial(shardkit_pieces.tensor_of, str(side.folder))
    backwards = side.records[0]["backwards"]
    if any(share is None for share in backwards):
        return
    for share in backwards:
        yield {
            name: sum(numbers(piece) for piece in change["plus"]) - sum(numbers(piece) for piece in change["minus"])
            for name, change in share.items()
            if change is not None
        }


def uncounted(side: Side, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The backwards (from 1) of one process's step that leave nothing in its gradient: a defect that needs no ranks."""
    shares = list(shares_of(side))
    names = [name for name in shapes if _has(side, name) and all(name in share for share in shares)]
    if len(shares) < 2 or not names:
        return ()
    matrix = torch.stack([_sampled(share, names, shapes) for share in shares], 1)
    gradient = _sampled(side, names, shapes)
    weights = torch.linalg.lstsq(matrix, gradient[:, None], driver="gelsd").solution[:, 0].abs()
    return tuple(number for number, w in enumerate(weights.tolist(), 1) if w < NO_WEIGHT * float(weights.max()))
