"""Each rank's pieces of a tensor make the full one, and copies that differ are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.prove.inject import shardkit_pieces as pieces

FULL = torch.arange(24.0).reshape(4, 6)


def written(folder: Path, tensors: list[Any]) -> dict[int, dict[str, Any]]:
    """Rank → the piece that it wrote."""
    by_rank = {}
    for rank, tensor in enumerate(tensors):
        writer = pieces.PieceWriter(str(folder / f"step1.rank{rank}.bin"))
        writer.add(torch.ones(3))  # so that the piece begins inside of its file
        by_rank[rank] = writer.add(tensor)
        writer.close({})
    return by_rank


def fragment(start: int, end: int) -> pieces.Fragment:
    return pieces.Fragment(FULL.reshape(-1)[start:end], start, (4, 6))


@pytest.mark.parametrize("parts", [
    [fragment(0, 9), fragment(9, 24)], [fragment(0, 24), fragment(0, 0)], [fragment(0, 0), fragment(0, 24)],
    [fragment(12, 24), fragment(0, 12), fragment(12, 24)], [fragment(0, 20), fragment(20, 24), fragment(24, 24)],
    [FULL, fragment(3, 5)], [FULL, FULL], [*FULL.chunk(2)], [*FULL.chunk(3, 1)], [*FULL.chunk(2), *FULL.chunk(2)],
    [FULL[:2], FULL[:2], FULL[2:], FULL[2:]],
])  # fmt: skip
def test_copies_fragments_and_splits_by_hand_make_the_full_tensor(tmp_path: Path, parts: list[Any]) -> None:
    tensor, differing = pieces.assemble(str(tmp_path), written(tmp_path, parts), (4, 6))
    assert torch.equal(tensor, FULL) and differing == []


def test_indices_are_sampled_of_each_stretch_of_a_dimension() -> None:
    for shape, n_numbers, counts in (((4096, 4096), 2**20, (1024, 1024)), ((8, 2048, 512), 2**14, (8, 45, 45))):
        indices = pieces.grid("head.weight", shape, n_numbers)
        for dim, (index, length, count) in enumerate(zip(indices, shape, counts, strict=True)):
            begins = torch.arange(count + 1) * length // count
            assert bool((index >= begins[:-1]).all() and (index < begins[1:]).all()), dim
        again, other = pieces.grid("head.weight", shape, n_numbers), pieces.grid("tail.weight", shape, n_numbers)
        assert all(map(torch.equal, indices, again)) and not all(map(torch.equal, indices, other))


LARGE = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("parts", "are_copies"), [
    ([LARGE, LARGE], True), ([*LARGE.chunk(2)], False), ([*LARGE.chunk(2, 1), *LARGE.chunk(2, 1)], True),
    ([pieces.Fragment(LARGE.reshape(-1)[a:b], a, LARGE.shape) for a, b in ((0, 9), (9, 10), (10, 11), (11, 3072))], 0),
])  # fmt: skip
def test_the_samples_of_ranks_are_one_of_the_full_tensor(tmp_path: Path, parts: list[Any], are_copies: bool) -> None:
    by_rank = {}
    for rank, part in enumerate(parts):
        writer = pieces.PieceWriter(str(tmp_path / f"step1.rank{rank}.bin"))
        by_rank[rank] = writer.add(part, pieces.grid("w", tuple(part.shape), 192))
        writer.close({})
    grid = pieces.grid_like("w", (48, 64), by_rank, 192)
    assert grid is not None
    sample = pieces.crossings(LARGE, grid)
    assert 100 < sample.numel() < 400
    tensor, differing = pieces.assemble(str(tmp_path), by_rank, tuple(sample.shape))
    assert torch.equal(tensor, sample) and differing == []
    tensor, _ = pieces.assemble(str(tmp_path), pieces.unsampled(by_rank), (48, 64))
    assert torch.equal(tensor, LARGE)
    assert pieces.norm(by_rank, tuple(sample.shape)) == pytest.approx(float(LARGE.norm()))
    by_rank[len(parts) - 1]["hash"] = "another"  # of numbers that are not sampled
    assert pieces.assemble(str(tmp_path), by_rank, tuple(sample.shape))[1] == [len(parts) - 1] * are_copies


def test_a_number_may_be_held_as_a_tensor_of_one(tmp_path: Path) -> None:
    for parts in ([torch.tensor(3.0), torch.tensor(3.0)], [torch.ones(1) * 3, torch.ones(1) * 3]):
        tensor, differing = pieces.assemble(str(tmp_path), written(tmp_path, parts), ())
        assert torch.equal(tensor, torch.tensor(3.0)) and differing == []
        pieces._MAPS.clear()


def test_a_copy_that_differs_names_its_rank(tmp_path: Path) -> None:
    _, differing = pieces.assemble(str(tmp_path), written(tmp_path, [FULL, FULL, FULL + 1e-7 * FULL]), (4, 6))
    assert differing == [2]
    other = pieces.Fragment(FULL.reshape(-1)[12:] + 1, 12, (4, 6))
    pieces._MAPS.clear()
    _, differing = pieces.assemble(str(tmp_path), written(tmp_path, [fragment(0, 12), fragment(12, 24), other]), (4, 6))
    assert differing == [2]


@pytest.mark.parametrize("parts", [
    [FULL[:3], FULL[:3]], [fragment(0, 9), fragment(10, 24)], [fragment(0, 23)], [fragment(1, 24)],
])  # fmt: skip
def test_pieces_that_do_not_fill_the_shape_make_nothing(tmp_path: Path, parts: list[Any]) -> None:
    assert pieces.assemble(str(tmp_path), written(tmp_path, parts), (4, 6)) == (None, [])


def test_bf16_and_empty_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    for tensor in (FULL.bfloat16(), FULL[:0], torch.tensor(3.0), FULL > 3):
        (piece,) = written(tmp_path, [tensor]).values()
        pieces._MAPS.clear()
        assert torch.equal(pieces.tensor_of(str(tmp_path), piece), tensor)
