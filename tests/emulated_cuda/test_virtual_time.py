"""EMUCUDA_KERNEL_US and EMUCUDA_GEMM_US: kernels keep their stream busy while the program runs ahead of the device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulated_cuda import call, needs_emulation
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_emulation]

SLOW = {"EMUCUDA_KERNEL_US": "200000", "EMUCUDA_GEMM_US": "800000"}
"""Long beside what the host needs for a call, on a busy machine too."""
KERNEL, PRODUCT = 200.0, 800.0


class Clock:
    """Milliseconds since the last look."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def __call__(self) -> float:
        before, self.last = self.last, time.perf_counter()
        return 1e3 * (self.last - before)


def single_stream() -> dict[str, Any]:
    """How long the host is in each call, and what events say of the device."""
    x = torch.ones(8, 8, device="cuda")
    torch.mm(x, x)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found: dict[str, Any] = {}
    clock = Clock()
    begin.record()
    for _ in range(4):
        x = x + 1
    x = torch.mm(x, x)
    end.record()
    found["calls"] = clock()
    found["done at once"] = end.query() or torch.cuda.current_stream().query()
    end.synchronize()
    found["synchronise"] = clock()
    found["done"] = end.query() and torch.cuda.current_stream().query()
    found["elapsed"] = begin.elapsed_time(end)
    clock()
    (x * 2).sum().item()
    found["item"] = clock()
    (x * 2).sum()
    torch.cuda.synchronize()
    found["device"] = clock()
    found["value"] = x[0, 0].item()
    clock()
    (x * 2).cpu()
    found["pageable"] = clock()
    return found


@pytest.mark.parametrize("compute", ["1", "0"])
def test_the_host_runs_ahead_and_whoever_waits_waits_for_the_durations(compute: str) -> None:
    found = call(single_stream, EMUCUDA_COMPUTE=compute, **SLOW)
    busy = 4 * KERNEL + PRODUCT
    assert found["calls"] < busy, "the calls did not wait"
    assert not found["done at once"] and found["done"]
    assert found["calls"] + found["synchronise"] >= busy - 1
    # The device is idle for no longer than the calls take.
    assert busy - 1 <= found["elapsed"] <= busy + found["calls"]
    assert found["item"] >= 2 * KERNEL and found["device"] >= 2 * KERNEL and found["pageable"] >= KERNEL
    if compute == "1":
        assert found["value"] == 8 * 5.0**2, "the numbers are right"


def side_streams() -> dict[str, Any]:
    """A copy to pinned memory on a side stream, behind a kernel of the main one; two streams side by side."""
    x, pinned = torch.zeros(1 << 10, device="cuda"), torch.zeros(1 << 10).pin_memory()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    clock = Clock()
    x = x + 3
    one.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(one):
        pinned.copy_(x, non_blocking=True)
    found: dict[str, Any] = {"calls": clock()}
    one.synchronize()
    found["waited"] = found["calls"] + clock()
    found["values"] = pinned.tolist()[:2]
    torch.cuda.synchronize()
    clock()
    for stream in (one, other):
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    found["side by side"] = clock()
    return found


def test_time_passes_along_events_and_on_each_stream_by_itself() -> None:
    found = call(side_streams, **SLOW)
    assert found["waited"] >= KERNEL - 1 and found["values"] == [3.0, 3.0]
    assert 4 * KERNEL - 1 <= found["side by side"] < 8 * KERNEL


def meet() -> float:
    """How long rank 0 waits for a collective, to which the stream of rank 1 comes two products later."""
    x = torch.ones(4, 4, device="cuda")
    dist.all_reduce(x)  # makes the communicator
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    dist.barrier()  # else a rank that gets no processor would begin when the other's products are under way
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        for _ in range(2):
            torch.mm(x, x)
    dist.all_reduce(x)
    end.record()
    end.synchronize()
    assert x[0, 0].item() == 4.0
    return float(begin.elapsed_time(end))


def test_a_collective_begins_when_the_last_ranks_stream_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLOW.items():
        monkeypatch.setenv(name, value)
    assert min(run_ranks(2, f"{__name__}:meet", gpu=True)) > 2 * PRODUCT
