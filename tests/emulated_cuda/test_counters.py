"""What a program asked of the runtime is counted, and the time that only the emulation takes."""

from __future__ import annotations

from collections.abc import Callable
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


def test_events_are_counted() -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    assert made(lambda: event.record(side)) == {"event_record": 1}
    assert made(lambda: side.wait_event(event)) == {"stream_wait_event": 1}
    assert made(event.query) == {"event_query": 1}
    assert made(side.query) == {"stream_query": 1}


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


def own_times() -> list[dict[str, int]]:
    """Of no-compute mode: two turns of sums over small tensors, one over large ones, one of copies, one of nothing.

    Of each sum, the turn in which computing took least: the processor's time has what a busy machine's others cost it.
    """
    import emucuda

    small, large = torch.ones(4096, device="cuda"), torch.zeros(1 << 20, device="cuda")
    pinned = torch.ones(1 << 16).pin_memory()
    there = pinned.cuda()

    def sums(of: torch.Tensor) -> None:
        for _ in range(200):
            of + 1

    def turn(each: Callable[[], object]) -> dict[str, int]:
        torch.cuda.synchronize()
        with emucuda.counting() as made:
            each()
            torch.cuda.synchronize()
        return {name: number for name, number in made.items() if name.endswith("_ns")}

    def shortest(of: torch.Tensor) -> dict[str, int]:
        return min((turn(lambda: sums(of)) for _ in range(10)), key=lambda made: made["computing_ns"])

    return [shortest(small), shortest(small), shortest(large), turn(lambda: there.copy_(pinned, True)), turn(int)]


def test_the_emulations_own_time_is_counted() -> None:
    first, again, large, copied, nothing = call(own_times, EMUCUDA_COMPUTE="0")
    assert first["computing_ns"] > 200 * 500, "each takes a microsecond and more"
    assert 1 / 3 < first["computing_ns"] / again["computing_ns"] < 3
    assert large["computing_ns"] == 0 < large["bookkeeping_ns"], "skipped"
    for made in (first, again, large):
        assert made["emulating_here_ns"] == made["computing_ns"] + made["bookkeeping_ns"]
    assert copied["streams_ns"] > 0 == copied["computing_ns"], "on the stream's thread"
    assert set(nothing.values()) == {0}


def test_counting_needs_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    import emucuda

    monkeypatch.setenv("EMUCUDA", "0")
    with pytest.raises(RuntimeError, match="EMUCUDA=1"):
        emucuda.counts()
