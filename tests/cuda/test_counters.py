"""What a warm training step asks of CUDA, held for every engine: waits, copies, allocations, and the memory it keeps.

A change that adds a wait or a copy to a step has to change the table here, on purpose.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from tests.cuda import gpu_ranks
from tests.cuda.parity import BASE, OFFLOADED, Case, pool
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200), needs_emulation]

CASES = [*map(Case, BASE), *map(Case, OFFLOADED), Case("single@1", offload=True), Case("fsdp@2", offload=True)]
WAITS = ("device_sync", "stream_sync", "event_sync")
COPIES = ("copy_h2d", "copy_d2h")
ALLOCATES = ("malloc", "free", "mem_create", "mem_release", "mem_map", "mem_unmap", "host_alloc", "host_free")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[Any]]]:
    out: dict[str, dict[str, list[Any]]] = {}
    for (world, backend), group in groupby(sorted(CASES, key=pool), pool):
        ranks = gpu_ranks(world, "tests.cuda.steady:counted", timeout=600, todo=list(group), backend=backend)
        out |= {named(case): result for case, result in ranks[0].items()}
    return out


def named(case: Case) -> str:
    return case.engine + " with activations on the host" * case.offload


EXPECTED: dict[str, tuple[int, int, int]] = {
    "single@1": (0, 2, 0), "zero2+optimizer@1": (125, 181, 2), "zero3+optimizer+param@1": (77, 270, 6),
    "single@1 with activations on the host": (0, 158, 0), "fsdp+param@2": (58, 165, 29), "ddp@2": (0, 2, 0),
    "fsdp@2": (0, 2, 0), "zero1@2": (5, 3, 0), "zero2@2": (6, 3, 0), "zero3@2": (8, 5, 2),
    "zero1+optimizer@2": (23, 28, 2), "zero2+optimizer@2": (37, 49, 2), "zero3+optimizer@2": (15, 156, 8),
    "zero3+optimizer+param@2": (129, 270, 6), "fsdp@2 with activations on the host": (0, 158, 0),
    "hsdp+param@4": (58, 165, 29), "hsdp@4": (0, 2, 0),
}  # fmt: skip
"""Waits, copies, and copies of pageable memory on rank 0, with torch 2.13 and DeepSpeed 0.19.8.

fsdp+param waits in each micro-batch after the first: torch adds up gradients on the CPU there.
"""


@pytest.mark.parametrize("name", [named(case) for case in CASES])
def test_a_step_asks_for_what_it_did_and_keeps_no_memory(name: str, found: dict[str, dict[str, list[Any]]]) -> None:
    for figures in found[name].values():
        assert figures == figures[:1] * len(figures), "each step asks for the same and holds the same"
    calls = found[name]["calls"][0]
    waits, copies, allocated = (sum(calls.get(key, 0) for key in keys) for keys in (WAITS, COPIES, ALLOCATES))
    assert (waits, copies, calls.get("copy_pageable", 0)) == EXPECTED[name], calls
    assert allocated == 0, calls
