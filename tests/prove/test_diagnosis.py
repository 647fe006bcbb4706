"""Differences between ranks and one process, made by hand, and the words for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.prove.compare import Difference, Side, compare
from shardkit.prove.diagnosis import Counts, common_factor, explain
from shardkit.prove.inject import shardkit_pieces as pieces

GRADIENT = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def side(
    folder: Path, name: str, tensors: list[Any], offsets: list[Any] | None = None, grid: list[Any] | None = None
) -> Side:
    folder = folder / name
    folder.mkdir()
    records = {}
    for rank, tensor in enumerate(tensors):
        writer = pieces.PieceWriter(str(folder / f"step1.rank{rank}.bin"))
        piece = None if tensor is None else writer.add(tensor, grid)
        if piece is not None and offsets is not None:
            piece |= {"offset": offsets[rank], "shape": tuple(GRADIENT.shape)}
        writer.close({"raw": {"w": piece}})
        records[rank] = {"raw": {"w": piece}}
    return Side(folder, records, "raw")


def difference(
    folder: Path, ranks: list[Any], offsets: list[Any] | None = None, grid: list[Any] | None = None
) -> Difference:
    reference = side(folder, "process", [GRADIENT], grid=grid)
    moved = side(folder, "moved", [GRADIENT * (1 + 1e-7)], grid=grid)
    counts = Counts(ranks=2, micro_batches=3, targets=0)
    return compare(side(folder, "ranks", ranks, offsets, grid), reference, moved, lambda t: explain(t, counts))["w"]


def test_a_large_gradient_is_judged_by_a_sample_and_its_norm(tmp_path: Path) -> None:
    grid = pieces.grid("w", (8, 6), 12)
    hidden = torch.ones(8, 6, dtype=torch.bool)
    hidden[torch.meshgrid(*grid, indexing="ij")] = False
    for number, (ranks, kind, words) in enumerate([
        ([GRADIENT, GRADIENT], "", ""),
        ([2 * GRADIENT, 2 * GRADIENT], "factor", "the number of ranks, in the sample"),
        ([GRADIENT * ~hidden] * 2, "other", "the sampled numbers are equal, and the norm of all is"),
        ([GRADIENT, GRADIENT + 0.1 * hidden], "copies differ", "ranks 1 differ"),
        ([GRADIENT * hidden] * 2, "other", "zero, in the sample"),
        ([0 * GRADIENT] * 2, "missing gradient", "zero"),
    ]):  # fmt: skip
        (tmp_path / str(number)).mkdir()
        judged = difference(tmp_path / str(number), ranks, grid=grid)
        assert judged.kind == kind and words in judged.cause, judged


HALVES: list[Any] = [(0, 0), (4, 0)]
CASES: list[tuple[Callable[[torch.Tensor], list[torch.Tensor | None]], Any, str, str]] = [
    (lambda g: [g, g], None, "", ""),
    (lambda g: [g * (1 + 1e-7)] * 2, None, "", ""),
    (lambda g: [g[:4], g[4:]], HALVES, "", ""),
    (lambda g: [2 * g, 2 * g], None, "factor", "x2: multiplied by 2, the number of ranks"),
    (lambda g: [g / 3, g / 3], None, "factor", "divided by 3, the micro-batches of a step"),
    (lambda g: [-g, -g], None, "sign", "the sign is turned"),
    (lambda g: [-1.003 * g] * 2, None, "sign", "x-1.003"),
    (lambda g: [g[:4], 0 * g[4:]], HALVES, "shard", "zero on the parts of rank 1"),
    (lambda g: [g[:4], 2 * g[4:]], HALVES, "shard", "each rank's part by another factor"),
    (lambda g: [torch.cat([g[:4], 0 * g[4:]])] * 2, None, "shard", "zero in 4 of 8 of dimension 0"),
    (lambda g: [0.3 * g + 0.1, 0.7 * g - 0.1], None, "not summed", "their sum is right"),
    (lambda g: [1.3 * g + 0.1, 0.7 * g - 0.1], None, "not summed", "their mean is right"),
    (lambda g: [g, g + 0.1], None, "copies differ", "ranks 1 differ"),
    (lambda g: [g, None], None, "missing gradient", "no gradient on rank 1"),
    (lambda g: [0 * g, 0 * g], None, "missing gradient", "zero"),
    (lambda g: [g + 0.1] * 2, None, "other", "another direction"),
]


@pytest.mark.parametrize(("ranks", "offsets", "kind", "words"), CASES)
def test_words(tmp_path: Path, ranks: Any, offsets: Any, kind: str, words: str) -> None:
    wrong = difference(tmp_path, ranks(GRADIENT), offsets)
    assert wrong.kind == kind and words in wrong.cause, wrong


def test_a_factor_is_common_only_if_all_have_it() -> None:
    two, three = Difference("a", "factor", "x2", factor=2.0), Difference("b", "factor", "x3", factor=3.0)
    assert common_factor({"a": two, "b": two}) == 2
    assert common_factor({"a": two, "b": three}) is None
    assert common_factor({"a": two, "b": Difference("b", "factor", "x2.01", factor=2.01)}) is not None  # of bf16
    assert common_factor({"a": two, "b": Difference("b", "", "")}) == 2  # the right ones do not count
