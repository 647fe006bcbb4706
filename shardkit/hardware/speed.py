"""Measure one rank's device on its own: matrix products, memory, copies, single operators."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ..parallel.compat import scaled_product

_ROUNDS = 5
_ROUND_S = 0.02
"""A round repeats the timed work for about this long, so that starting and stopping the clock does not count."""
_BUDGET_S = 1.0
_PRODUCT = {"cuda": 8192, "cpu": 1024}
_ELEMENTS = {"cuda": 2**27, "cpu": 2**25}
"""Elements of a tensor that no cache holds: 512 and 128 MiB in fp32."""
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matmul_types(device: torch.device) -> list[str]:
    """The compute types whose products can be timed; on the CPU, those it trains in."""
    if device.type != "cuda":
        return ["fp32", "bf16"]
    fp8 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    return ["fp32", "tf32", "bf16", "fp16", *(["fp8"] if fp8 else [])]


def matmul_flops(device: torch.device, kind: str) -> float:
    """FLOP/s of products of two large square matrices of one of `matmul_types`."""
    n, before = _PRODUCT[device.type], torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        return 2 * n**3 / seconds(device, _product(device, kind, n))
    finally:
        torch.set_float32_matmul_precision(before)


def _product(device: torch.device, kind: str, n: int) -> Callable[[], object]:
    # Random numbers: a GPU multiplies ones a tenth faster, with less power.
    if kind != "fp8":
        a, b = (torch.randn(n, n, device=device, dtype=_DTYPES[kind]) for _ in range(2))
        return lambda: a @ b
    x, y = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    return lambda: scaled_product(x, y.t(), scale)


def memory_speed(device: torch.device) -> float:
    """Bytes read and written per second by an element-wise kernel."""
    n = _ELEMENTS[device.type]
    if device.type == "cuda":
        n = min(n, torch.cuda.mem_get_info(device)[0] // 32)
    a, b, c = (torch.ones(n, device=device) for _ in range(3))
    return 3 * 4 * n / seconds(device, lambda: torch.add(a, b, out=c))


def new_page_speed() -> float:
    """Bytes per second at which the system supplies new host memory to a large tensor."""
    n = 2**26

    def fill_new() -> object:
        return torch.empty(n, dtype=torch.uint8).fill_(1)

    scratch = torch.empty(n, dtype=torch.uint8)
    on_cpu = torch.device("cpu")
    return n / max(seconds(on_cpu, fill_new) - seconds(on_cpu, lambda: scratch.fill_(1)), 1e-9)


def copy_speed(device: torch.device) -> float:
    """Bytes per second from pinned host memory to the device; on the CPU, of a copy within host memory."""
    cuda = device.type == "cuda"
    source = torch.zeros(2**28 if cuda else 2**26, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(source, device=device)
    return source.numel() / seconds(device, lambda: target.copy_(source, non_blocking=True))


def operator_seconds(device: torch.device) -> float:
    """Seconds per operator with next to nothing to compute, issued back to back: dispatch, or a kernel's launch."""
    x = torch.zeros(1, device=device)
    return seconds(device, lambda: x.add_(1.0))


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median seconds of one call, over rounds, after one call to warm up."""
    timed(device, work)
    once = max(timed(device, work), 1e-9)
    calls = max(1, min(1000, int(_ROUND_S / once)))
    rounds = max(1, min(_ROUNDS, int(_BUDGET_S / (once * calls))))
    return statistics.median(timed(device, work, calls) for _ in range(rounds))


def timed(device: torch.device, work: Callable[[], object], calls: int = 1) -> float:
    """Mean seconds per call, over `calls` in a row; on a GPU by its clock, which waiting for it does not add to."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - began) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    begin.record(torch.cuda.current_stream(device))
    for _ in range(calls):
        work()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls
