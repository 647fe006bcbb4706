"""What a warm training step asks of CUDA, held for every engine: waits, copies, allocations, and the memory it keeps.

`EMUCUDA=1 EMUCUDA_DEVICES=4 python -m tests.cuda.steady` prints the calls of each step. A change that adds a wait, a
copy or an allocation to a step has to change the table here, on purpose.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from tests.cuda import gpu_ranks
from tests.cuda.parity import BASE, OFFLOADED, Case, pool
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.deepspeed, needs_emulation]

CASES = [*map(Case, BASE), *map(Case, OFFLOADED), Case("single@1", offload=True), Case("fsdp@2", offload=True)]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[Any]]]:
    out: dict[str, dict[str, list[Any]]] = {}
    for (world, backend), group in groupby(sorted(CASES, key=pool), pool):
        ranks = gpu_ranks(world, "tests.cuda.steady:counted", todo=list(group), backend=backend)
        out |= {named(case): result for case, result in ranks[0].items()}
    return out


def named(case: Case) -> str:
    return case.engine + " with activations on the host" * case.offload


EXPECTED: dict[str, dict[str, int]] = {}


@pytest.mark.parametrize("name", map(named, CASES))
def test_a_step_asks_for_what_it_did(name: str, found: dict[str, dict[str, list[Any]]]) -> None:
    first, *others = found[name]["calls"]
    assert others == [first] * len(others), "each step asks for the same"
    assert first == EXPECTED[name]


@pytest.mark.parametrize("name", map(named, CASES))
def test_a_step_keeps_no_memory(name: str, found: dict[str, dict[str, list[Any]]]) -> None:
    first, *others = found[name]["memory"]
    assert others == [first] * len(others)
