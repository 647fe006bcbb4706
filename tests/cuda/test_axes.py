"""Plans of runs whose ranks share layers or sequences, held against real ranks on emulated cards over NCCL."""

from __future__ import annotations

import pytest

from benchmarks.card_axes import CASES, measure
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_the_allocators(name: str) -> None:
    case = measure(name)
    assert case["outcome"] == "ok", case["message"]
    assert case["took"]["allocated"] == pytest.approx(case["planned"]["allocated"], rel=0.01)
