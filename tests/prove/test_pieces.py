"""Each rank's pieces of a tensor make the full one, and copies that differ are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.prove.inject import shardkit_pieces as pieces

FULL = torch.arange(24.0).reshape(4, 6)


def written(folder: Path, tensors: list[torch.Tensor]) -> dict[int, dict[str, Any]]:
    """Rank → the piece that it wrote."""
    by_rank = {}
    for rank, tensor in enumerate(tensors):
        writer = pieces.PieceWriter(str(folder / f"step1.rank{rank}.bin"))
        writer.add(torch.ones(3))  # so that the piece begins inside of its file
        by_rank[rank] = writer.add(tensor)
        writer.close({})
    return by_rank


@pytest.mark.parametrize("parts", [
    [FULL, FULL], [*FULL.chunk(2)], [*FULL.chunk(3, 1)], [*FULL.chunk(2), *FULL.chunk(2)],
    [FULL[:2], FULL[:2], FULL[2:], FULL[2:]],
])  # fmt: skip
def test_copies_and_splits_by_hand_make_the_full_tensor(tmp_path: Path, parts: list[torch.Tensor]) -> None:
    tensor, differing = pieces.assemble(str(tmp_path), written(tmp_path, parts), (4, 6))
    assert torch.equal(tensor, FULL) and differing == []


def test_a_number_may_be_held_as_a_tensor_of_one(tmp_path: Path) -> None:
    for parts in ([torch.tensor(3.0), torch.tensor(3.0)], [torch.ones(1) * 3, torch.ones(1) * 3]):
        tensor, differing = pieces.assemble(str(tmp_path), written(tmp_path, parts), ())
        assert torch.equal(tensor, torch.tensor(3.0)) and differing == []
        pieces._MAPS.clear()


def test_a_copy_that_differs_names_its_rank(tmp_path: Path) -> None:
    _, differing = pieces.assemble(str(tmp_path), written(tmp_path, [FULL, FULL, FULL + 1e-7 * FULL]), (4, 6))
    assert differing == [2]


def test_pieces_that_do_not_fill_the_shape_make_nothing(tmp_path: Path) -> None:
    assert pieces.assemble(str(tmp_path), written(tmp_path, [FULL[:3], FULL[:3]]), (4, 6)) == (None, [])


def test_bf16_and_empty_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    for tensor in (FULL.bfloat16(), FULL[:0], torch.tensor(3.0), FULL > 3):
        (piece,) = written(tmp_path, [tensor]).values()
        pieces._MAPS.clear()
        assert torch.equal(pieces.tensor_of(str(tmp_path), piece), tensor)
