"""Checksums of a frozen model's weights: the same however ranks hold a tensor, and another one for other weights."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from shardkit.checkpoint.frozen_base import WordSums, as_checksum, digest_of_pieces, element_sum, way_of
from shardkit.errors import CheckpointError

RECORDED = "d51ae3228bc3f74bfc692090955a0cd7"
RECORDED_SUMS = (195211218948442, 180138027855095, 125975637243542)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64, torch.float8_e4m3fn, torch.bool]


def of(dtype: torch.dtype, numel: int, seed: int = 0) -> torch.Tensor:
    content = torch.randint(0, 256, (numel * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    if dtype == torch.bool:
        content %= 2
    return content.to(torch.uint8).view(dtype)


def tensor_sum(values: torch.Tensor, start: int = 0) -> int:
    return as_checksum(WordSums()(values, start))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_checksums_of_a_tensors_ranges_add_up(dtype: torch.dtype) -> None:
    for seed in range(6):
        chance = random.Random(seed)
        numel = chance.randrange(8, 300_000)
        values, ends = of(dtype, numel, seed), [0, *sorted(chance.sample(range(1, numel), 5)), numel]
        views = sum(tensor_sum(values[a:b], a) for a, b in pairwise(ends))
        copies = sum(tensor_sum(values[a:b].clone(), a) for a, b in pairwise(ends))
        assert views % 2**48 == copies % 2**48 == tensor_sum(values), (seed, numel, ends)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_other_bit_and_two_exchanged_elements_are_another_checksum(dtype: torch.dtype) -> None:
    values = of(dtype, 200_000)
    checksum = tensor_sum(values)
    chance = random.Random(1)
    for _ in range(40):
        changed = values.clone()
        index = chance.randrange(values.numel() * dtype.itemsize)
        changed.view(torch.uint8)[index] ^= 1 if dtype == torch.bool else 1 << chance.randrange(8)
        assert tensor_sum(changed) != checksum, index
        first, second = chance.sample(range(values.numel()), 2)
        if values[first].view(1).view(torch.uint8).tolist() != values[second].view(1).view(torch.uint8).tolist():
            changed = values.clone()
            changed[[first, second]] = values[[second, first]]
            assert tensor_sum(changed) != checksum, (first, second)


def test_a_checksum_is_what_checkpoints_recorded() -> None:
    values = of(torch.bfloat16, 300_001)
    checksums = tensor_sum(values), tensor_sum(values[5:200_000], 5), tensor_sum(of(torch.float32, 70_000, 1))
    assert checksums == RECORDED_SUMS


def test_checksums_of_older_checkpoints_are_what_they_were() -> None:
    """Their digest of two tensors, recorded by version 0.2."""
    tensors = [("a", of(torch.bfloat16, 70_001)), ("b", of(torch.float32, 1000, 1))]
    pieces = [(name, [values[:65_000], values[65_000:]]) for name, values in tensors]
    assert digest_of_pieces(pieces, way_of({"digest": "without a kind"})) == RECORDED
    assert way_of({"checksum": 1}) is element_sum and isinstance(way_of({"checksum": 2}), WordSums)
    with pytest.raises(CheckpointError, match=r"of kind 3, this version knows 1 and 2\n"):
        way_of({"checksum": 3})
