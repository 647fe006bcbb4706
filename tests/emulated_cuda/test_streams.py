"""Streams run beside the program, as a GPU's do: what lacks a wait goes wrong, what has one goes right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulated_cuda import call, needs_emulation
from tests.emulated_cuda.counters import counting

pytestmark = [pytest.mark.gpu, needs_emulation]

LATE = {"EMUCUDA_COPY_DELAY_US": "200000"}
SIZE = 1 << 16


def copies() -> dict[str, Any]:
    """What is seen before and after each wait, when copies begin 200 ms late."""
    found: dict[str, Any] = {}
    ones, target = torch.ones(SIZE).pin_memory(), torch.zeros(SIZE, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        target.copy_(ones, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    found["event before"] = arrived.query()
    found["to the device before"] = target.sum().item()
    torch.cuda.current_stream().wait_event(arrived)
    found["to the device after"] = target.sum().item()
    found["event after"] = arrived.query()

    back = torch.zeros(SIZE).pin_memory()
    back.copy_(target, non_blocking=True)
    found["to the host before"] = back.sum().item()
    torch.cuda.synchronize()
    found["to the host after"] = back.sum().item()

    pageable = torch.zeros(SIZE)
    pageable.copy_(target, non_blocking=True)
    found["pageable"] = pageable.sum().item()

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    target.copy_(ones, non_blocking=True)
    end.record()
    end.synchronize()
    found["elapsed"] = begin.elapsed_time(end)
    return found


def test_a_late_copy_shows_without_a_wait_and_not_with_one() -> None:
    found = call(copies, **LATE)
    assert found["event before"] is False and found["event after"] is True
    assert found["to the device before"] == 0.0 and found["to the device after"] == SIZE
    assert found["to the host before"] == 0.0 and found["to the host after"] == SIZE
    assert found["pageable"] == SIZE, "the driver waits for pageable memory"
    assert found["elapsed"] >= 200.0


def freed_early() -> list[float]:
    """A block that a late copy still reads, reused; without and with record_stream."""
    found = []
    for recorded in (False, True):
        side = torch.cuda.Stream()
        host = torch.zeros(SIZE).pin_memory()
        block = torch.ones(SIZE, device="cuda")
        with torch.cuda.stream(side):
            host.copy_(block, non_blocking=True)
        if recorded:
            block.record_stream(side)
        address = block.data_ptr()
        del block
        again = torch.full((SIZE,), 7.0, device="cuda")
        assert (again.data_ptr() == address) is not recorded
        side.synchronize()
        found.append(host[0].item())
    return found


def test_memory_reused_under_a_copy_shows() -> None:
    assert call(freed_early, **LATE) == [7.0, 1.0]


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
