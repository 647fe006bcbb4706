"""Allocations are counted; tests/cuda/test_counters.py holds the waits and copies of every engine's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulated_cuda import call, needs_emulation
from tests.emulated_cuda.counters import counting

pytestmark = [pytest.mark.gpu, needs_emulation]


def made(function: Any) -> dict[str, int]:
    with counting() as calls:
        function()
    return {name: number for name, number in calls.items() if number and not name.endswith("_ns")}


def allocations() -> list[dict[str, int]]:
    """Of a block, of the same block from the cache, of giving it back, of pinned memory."""
    kept = []

    def take() -> None:
        kept.append(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))

    def pin() -> None:
        kept.append(torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True))

    torch.cuda.init()
    found = [made(take)]
    kept.clear()
    found.append(made(take))
    kept.clear()
    found.append(made(torch.cuda.empty_cache))
    found.append(made(pin))
    return found


def test_the_allocators_calls_are_counted() -> None:
    first, cached, emptied, pinned = call(allocations, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False")
    assert first == {"malloc": 1} and cached == {} and emptied["free"] == 1 and pinned == {"host_alloc": 1}
    first, cached, emptied, _ = call(allocations, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert first["mem_create"] == first["mem_map"] == 2, "pages of 20 MiB"
    assert cached == {} and emptied["mem_unmap"] == emptied["mem_release"] == 2
