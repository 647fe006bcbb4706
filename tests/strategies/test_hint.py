"""One process under an engine that shards is told that `single` is faster."""

from __future__ import annotations

import pytest

from shardkit.config.load import load_config
from shardkit.strategies.build import slower_than_single
from tests.strategies.cases import on_cpus


@pytest.mark.parametrize(
    ("case", "world_size", "is_told"),
    [
        ("fsdp", 1, True), ("hsdp", 1, True), ("zero3", 1, True), ("single", 1, False), ("ddp", 1, False),
        ("zero1", 1, False), ("fsdp", 2, False), ("zero3", 8, False), ("zero3+optimizer+param", 1, False),
    ],
)  # fmt: skip
def test_only_one_process_under_an_engine_that_shards(case: str, world_size: int, is_told: bool) -> None:
    """Offload is a reason to stay."""
    hint = slower_than_single(load_config(None, on_cpus(case)).config, world_size)
    assert hint.count("parallel.strategy=single is faster") == bool(hint) == is_told
