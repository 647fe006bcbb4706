"""Models that nobody tuned shardkit for: the losses of one process, or a refusal that says what would work."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks

SHARED = ["ddp", "fsdp", "zero2", "zero3"]
TOLERANCE = 1e-6
"""Absolute, on losses near 4 of the first steps: what another order of additions in fp32 makes of them."""


@pytest.fixture(scope="module")
def one_rank() -> dict[Any, Any]:
    return run_ranks(1, "tests.strategies.foreign:by_expert", strategies=["single"])[0]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Any]]:
    return run_ranks(2, "tests.strategies.foreign:by_expert", strategies=SHARED)


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize(("strategy", "case"), [
    ("fsdp", "nested"), ("ddp+unused", "nested"), ("ddp+unused", "top"), ("fsdp+class", "top"),
])  # fmt: skip
def test_experts_chosen_by_the_data_train_as_in_one_process(
    strategy: str, case: str, one_rank: dict[Any, Any], two_ranks: list[dict[Any, Any]]
) -> None:
    assert two_ranks[0][strategy, case] == pytest.approx(one_rank["single", case], abs=TOLERANCE)
