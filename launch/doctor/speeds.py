"""What was measured of the ranks together, as findings: which rank is slow, clocks that differ, bandwidths."""

from __future__ import annotations

import statistics
from typing import Any

from .finding import Check, warning

SLOW = 1.2
"""A rank that takes this many times the median is named."""


def findings(constants: dict[str, Any], hosts: list[str]) -> list[Check]:
    """Findings from the constants: slow ranks by name, clock skew."""
    checks = []
    for key, label, unit, scale in (
        ("matmul_flops", "matmul", "TFLOP/s", 1e12),
        ("copy_bytes_per_s", "copies", "GB/s", 1e9),
    ):
        values = [float(v) for v in constants[key]]
        middle = statistics.median(values)
        slow = [f"rank {rank}@{hosts[rank]}" for rank, value in enumerate(values) if value * SLOW < middle]
        summary = f"median {middle / scale:.3g} {unit}, slowest {min(values) / scale:.3g}"
        summary += f"; slow: {', '.join(slow)}" if slow else ""
        fix = "look for other processes, heat or power limits there (nvidia-smi -q -d PERFORMANCE)"
        checks.append(warning(f"{label} per rank", bool(slow), summary, fix))
    for key in ("all_reduce", "all_gather", "reduce_scatter"):
        for size, speed in constants[key]:
            checks.append(Check(f"{key} {_size(size)}", "pass", f"{speed / 1e9:.3g} GB/s bus bandwidth"))
    if len(constants["latency_s"]) > 1:
        far = max(range(1, len(hosts)), key=lambda rank: float(constants["latency_s"][rank]))
        worst = float(constants["latency_s"][far])
        checks.append(Check("latency", "pass", f"rank 0 to rank {far}@{hosts[far]}: {worst * 1e6:.0f} µs, the longest"))
    products = ", ".join(f"{kind} {flops / 1e12:.3g}" for kind, flops in constants["matmul_flops_by_dtype"].items())
    checks.append(Check("matmul by type", "pass", f"{products} TFLOP/s"))
    memories = ("memory", "memory_bytes_per_s"), ("host memory", "host_bytes_per_s")
    speeds = ", ".join(f"{label} {constants[key] / 1e9:.3g}" for label, key in memories)
    checks.append(Check("bandwidth of each rank", "pass", f"{speeds} GB/s read and written"))
    skew = float(constants["clock_skew_s"])
    summary = f"differ by at most {skew:.3f} s"
    checks.append(warning("clocks", skew > 1.0, summary, "run chrony or ntpd on every node"))
    return checks


def _size(n_bytes: int) -> str:
    return f"{n_bytes // 2**20} MiB" if n_bytes >= 2**20 else f"{n_bytes // 2**10} KiB"
