"""Rows made by hand, and what torch's profiler saw of its allocator."""

from __future__ import annotations

from typing import Any

from shardkit.memory.rows import KINDS, DeviceMemory, HostMemory, Identity, PhaseMemory, RankRow, StateBytes, StateKind

MIB = 2**20
PLAIN = [kind for kind in KINDS if kind != "quantized"]
NOTHING_PACKED: dict[StateKind, StateBytes] = {"quantized": StateBytes(0, 0)}


def cpu_row(rank: int, peak_rss: int = 300 * MIB, step_time_s: float | None = 0.1, host: str = "node1") -> RankRow:
    return RankRow(
        identity=Identity(rank, host, rank, "cpu"),
        step_time_s=step_time_s,
        busy_s=step_time_s,
        data_wait_s=0.01,
        host_mem=HostMemory(200 * MIB, peak_rss, 150 * MIB, None, 2**33),
        device_mem=None,
        state={**NOTHING_PACKED, **{kind: StateBytes((index + 1) * MIB, 0) for index, kind in enumerate(PLAIN)}},
        phases={"forward": PhaseMemory(None, None, None, None, 200 * MIB, 250 * MIB)},
        alloc_retries=None,
        ooms=None,
        overhead_s=0.002,
    )


def gpu_row(rank: int, peak: int = 3 * 2**30, host: str = "node1") -> RankRow:
    return RankRow(
        identity=Identity(rank, host, rank, "NVIDIA H200"),
        step_time_s=0.5,
        busy_s=0.4,
        data_wait_s=0.0,
        host_mem=HostMemory(2**30, 2 * 2**30, 2**29, 2**28, 2**37),
        device_mem=DeviceMemory(2**30, peak, 2**31, peak + 2**30, 2**37),
        state={**NOTHING_PACKED, **{kind: StateBytes(2**29, 2**31 * (kind == "optimizer")) for kind in PLAIN}},
        phases={"update": PhaseMemory(2**30, peak, 2**31, peak + 2**30, 2**30, 2**31)},
        alloc_retries=2,
        ooms=0,
        overhead_s=0.25,
    )


def allocator_events(profiler: Any) -> list[int]:
    """Bytes allocated (> 0) and freed (< 0) by the c10 CPU allocator, in time order."""
    found: list[tuple[int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
        pending += event.children
    return [n_bytes for _, n_bytes in sorted(found, key=lambda item: item[0])]
