"""One process under an engine that shards is told that `single` is faster."""

from __future__ import annotations

import pytest

from shardkit.config.load import load_config
from shardkit.strategies.build import slower_than_single


@pytest.mark.parametrize(
    ("strategy", "world_size", "is_told"),
    [
        ("fsdp", 1, True), ("hsdp", 1, True), ("zero3", 1, True), ("single", 1, False), ("ddp", 1, False),
        ("zero1", 1, False), ("fsdp", 2, False), ("zero3", 8, False),
    ],
)  # fmt: skip
def test_only_one_process_under_an_engine_that_shards(strategy: str, world_size: int, is_told: bool) -> None:
    hint = slower_than_single(load_config(None, {"parallel.strategy": strategy}).config, world_size)
    assert ("parallel.strategy=single is faster" in hint) == is_told


def test_offloading_is_a_reason_to_stay() -> None:
    keys = {"parallel.strategy": "zero3", "parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"}
    assert slower_than_single(load_config(None, keys).config, 1) == ""
