"""What a program asked of the runtime is counted, and the time that only the emulation takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulated_cuda import call, needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation]

SYNCS = ("device_sync", "stream_sync", "event_sync")


def made(function: Any) -> dict[str, int]:
    import emucuda

    with emucuda.counting() as counts:
        function()
    return {name: number for name, number in counts.items() if number and not name.endswith("_ns")}


def test_synchronisations_are_counted() -> None:
    x, event = torch.ones(4, device="cuda"), torch.cuda.Event()
    event.record()
    assert made(lambda: x + 1) == {"emulated_operator": 1}
    assert made(torch.cuda.synchronize) == {"device_sync": 1}
    assert made(torch.cuda.current_stream().synchronize) == {"stream_sync": 1}
    assert made(event.synchronize) == {"event_sync": 1}
    found = made(lambda: x[0].item())
    assert found["stream_sync"] == 1 and found["copy_d2h"] == 1
    assert made(lambda: x.nonzero())["stream_sync"] == 1, "a shape that depends on values"


def test_copies_are_counted_by_direction_and_by_who_waits() -> None:
    pinned, pageable = torch.ones(4096).pin_memory(), torch.ones(4096)
    gpu = torch.empty(4096, device="cuda")
    found = made(lambda: gpu.copy_(pinned, non_blocking=True))
    assert found["copy_h2d"] == 1 and not any(name in found for name in (*SYNCS, "copy_pageable"))
    found = made(lambda: gpu.copy_(pageable))
    assert found["copy_h2d"] == 1 and found["copy_pageable"] == 1 and found["stream_sync"] == 1
    assert made(gpu.cpu)["copy_d2h"] == 1
    torch.cuda.synchronize()


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
