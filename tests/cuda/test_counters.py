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

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.deepspeed, pytest.mark.timeout(1200), needs_emulation]

CASES = [*map(Case, BASE), *map(Case, OFFLOADED), Case("single@1", offload=True), Case("fsdp@2", offload=True)]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[Any]]]:
    out: dict[str, dict[str, list[Any]]] = {}
    for (world, backend), group in groupby(sorted(CASES, key=pool), pool):
        ranks = gpu_ranks(world, "tests.cuda.steady:counted", timeout=600, todo=list(group), backend=backend)
        out |= {named(case): result for case, result in ranks[0].items()}
    return out


def named(case: Case) -> str:
    return case.engine + " with activations on the host" * case.offload


EXPECTED: dict[str, dict[str, int]] = {
    "single@1": {"copy_d2h": 2, "emulated_operator": 419},
    "zero2+optimizer@1": {
        "device_sync": 5, "stream_sync": 62, "event_sync": 58, "stream_wait_event": 4, "copy_pageable": 2,
        "copy_h2d": 33, "copy_d2h": 148, "emulated_operator": 876,
    },
    "zero3+optimizer+param@1": {
        "device_sync": 3, "stream_sync": 74, "stream_wait_event": 170, "copy_pageable": 6, "copy_h2d": 178,
        "copy_d2h": 92, "emulated_operator": 674,
    },
    "single@1 with activations on the host": {
        "stream_wait_event": 280, "copy_h2d": 52, "copy_d2h": 106, "emulated_operator": 563,
    },
    "fsdp+param@2": {
        "stream_sync": 29, "event_sync": 29, "stream_wait_event": 58, "copy_pageable": 29, "copy_h2d": 106,
        "copy_d2h": 59, "emulated_operator": 408,
    },
    "ddp@2": {"stream_wait_event": 2, "copy_d2h": 2, "emulated_operator": 360},
    "fsdp@2": {"stream_wait_event": 60, "copy_d2h": 2, "emulated_operator": 456},
    "zero1@2": {"device_sync": 4, "stream_sync": 1, "stream_wait_event": 2, "copy_d2h": 3, "emulated_operator": 437},
    "zero2@2": {"device_sync": 5, "stream_sync": 1, "stream_wait_event": 4, "copy_d2h": 3, "emulated_operator": 460},
    "zero3@2": {
        "device_sync": 3, "stream_sync": 5, "stream_wait_event": 298, "copy_pageable": 2, "copy_h2d": 2, "copy_d2h": 3,
        "emulated_operator": 719,
    },
    "zero1+optimizer@2": {
        "device_sync": 4, "stream_sync": 18, "event_sync": 1, "stream_wait_event": 2, "copy_pageable": 2, "copy_h2d": 4,
        "copy_d2h": 24, "emulated_operator": 456,
    },
    "zero2+optimizer@2": {
        "device_sync": 5, "stream_sync": 18, "event_sync": 14, "stream_wait_event": 4, "copy_pageable": 2,
        "copy_h2d": 11, "copy_d2h": 38, "emulated_operator": 472,
    },
    "zero3+optimizer@2": {
        "device_sync": 3, "stream_sync": 12, "stream_wait_event": 298, "copy_pageable": 8, "copy_h2d": 64,
        "copy_d2h": 92, "emulated_operator": 740,
    },
    "zero3+optimizer+param@2": {
        "device_sync": 3, "stream_sync": 126, "stream_wait_event": 298, "copy_pageable": 6, "copy_h2d": 178,
        "copy_d2h": 92, "emulated_operator": 740,
    },
    "fsdp@2 with activations on the host": {
        "stream_wait_event": 380, "copy_h2d": 52, "copy_d2h": 106, "emulated_operator": 708,
    },
    "hsdp+param@4": {
        "stream_sync": 29, "event_sync": 29, "stream_wait_event": 64, "copy_pageable": 29, "copy_h2d": 106,
        "copy_d2h": 59, "emulated_operator": 364,
    },
    "hsdp@4": {"stream_wait_event": 66, "copy_d2h": 2, "emulated_operator": 412},
}  # fmt: skip
"""On rank 0, with torch 2.13 and DeepSpeed 0.19.8; single, ddp, fsdp and hsdp wait for nothing.

fsdp+param waits in each micro-batch after the first: torch adds up gradients on the CPU there.
"""


@pytest.mark.parametrize("name", [named(case) for case in CASES])
def test_a_step_asks_for_what_it_did(name: str, found: dict[str, dict[str, list[Any]]]) -> None:
    first, *others = found[name]["calls"]
    assert others == [first] * len(others), "each step asks for the same"
    assert first == EXPECTED[name]


@pytest.mark.parametrize("name", [named(case) for case in CASES])
def test_a_step_keeps_no_memory(name: str, found: dict[str, dict[str, list[Any]]]) -> None:
    first, *others = found[name]["memory"]
    assert others == [first] * len(others)
