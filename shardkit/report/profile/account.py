"""Turn a trace into answers: each byte's category, live memory at the peak, top allocators. Imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from .chrome_trace import OUTSIDE, PHASES, ProfiledAllocation, Trace

CATEGORIES = ("params", "quantized", "master_params", "grads", "optimizer", "buffers", "activations", "other")
"""The ledger's kinds of state, activations, and the rest: scratch, communication, gathered parameters."""
STATE = CATEGORIES[:6]
TOP = 30
"""Most entries of each list."""

_Key = TypeVar("_Key", bound=Hashable)
Addresses = Mapping[int, tuple[str, int]]
"""Address of a storage with state → its category and bytes."""


@dataclass(frozen=True)
class Snapshot:
    """The addresses of state at one moment: the `start` of the trace, or the end of a phase's latest run.

    Attributes:
        gone: addresses of earlier snapshots whose storage no longer exists.
    """

    after: str
    addresses: Addresses
    gone: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Account:
    """Bytes over time: `times` (µs) are the moments of change, `levels` the bytes per category from then on."""

    trace: Trace
    category: Mapping[ProfiledAllocation, str]
    times: Sequence[float]
    levels: Sequence[tuple[int, ...]]

    @cached_property
    def peak(self) -> int:
        """Index of the moment with the most bytes."""
        totals = [sum(level) for level in self.levels]
        return totals.index(max(totals))


def account(trace: Trace, snapshots: Sequence[Snapshot], in_use: int | None = None) -> Account:
    """Assign a category to each allocation and add up.

    An allocation at the address of a snapshot's state is state. Activations are other allocations that forward made and
    left for backward or handed from one operator to the next; backward makes them too when it recomputes a forward.

    Args:
        in_use: bytes allocated when the trace began; `None` if the allocator does not say (CPU): then only state is
            known to have been there.
    """
    category: dict[ProfiledAllocation, str] = {}
    before: dict[int, tuple[str, int]] = {}
    released: dict[int, tuple[float, int, int]] = {}
    by_address = defaultdict[int, list[ProfiledAllocation]](list)
    for allocation in trace.allocations:
        by_address[allocation.address].append(allocation)
    for time, snapshot in zip(_times(trace, snapshots), snapshots, strict=True):
        for address, (kind, n_bytes) in snapshot.addresses.items():
            holder = next((a for a in by_address.get(address, ()) if a.start <= time < a.end), None)
            if holder is not None:
                category.setdefault(holder, kind)
            elif not any(a.start <= time for a in by_address.get(address, ())):
                before.setdefault(address, (kind, n_bytes))
        if in_use is None:  # the CPU's allocator does not report the release of blocks older than the trace
            for address in snapshot.gone & before.keys():
                released.setdefault(address, (time, address, before[address][1]))
    for allocation in trace.allocations:
        if allocation not in category:
            category[allocation] = "activations" if _is_activation(allocation, trace) else "other"
    freed = [*trace.freed_before, *released.values()]
    return Account(trace, category, *_levels(trace, category, before, freed, in_use))


def _times(trace: Trace, snapshots: Sequence[Snapshot]) -> list[float]:
    """The time of each snapshot: just after its phase, before the next phase touches anything."""
    ends = {phase: iter([end for _, end, _ in trace.runs(phase)]) for phase in PHASES}
    return [-math.inf if s.after == "start" else next(ends[s.after]) for s in snapshots]


def _is_activation(allocation: ProfiledAllocation, trace: Trace) -> bool:
    recorded = [op for op in allocation.caller.chain() if op.recorded] if allocation.caller else []
    if recorded and allocation.phase in ("forward", "backward") and allocation.end > recorded[-1].end:
        return True
    return allocation.phase == "forward" and allocation.end > trace.end_of_run(allocation.start)


def _levels(
    trace: Trace,
    category: Mapping[ProfiledAllocation, str],
    before: Addresses,
    freed: Sequence[tuple[float, int, int]],
    in_use: int | None,
) -> tuple[list[float], list[tuple[int, ...]]]:
    now = dict.fromkeys(CATEGORIES, 0)
    for kind, n_bytes in before.values():
        now[kind] += n_bytes
    if in_use is None:
        now["other"] += sum(n_bytes for _, address, n_bytes in freed if address not in before)
    else:
        now["other"] += max(0, in_use - sum(now.values()))
    changes = [(a.start, category[a], a.n_bytes) for a in trace.allocations]
    changes += [(a.end, category[a], -a.n_bytes) for a in trace.allocations if a.end < math.inf]
    changes += [(time, before.get(address, ("other",))[0], -n_bytes) for time, address, n_bytes in freed]
    begin = min((start for start, _, _ in trace.ranges), default=0.0)
    times, levels = [min(begin, *(c[0] for c in changes)) if changes else begin], [tuple(now.values())]
    for time, kind, n_bytes in sorted(changes, key=lambda change: (change[0], change[2])):
        now[kind] += n_bytes
        times.append(time)
        levels.append(tuple(now.values()))
    return times, levels


def summarise(account: Account, steps: Sequence[int]) -> dict[str, Any]:
    """The contents of `rank{r}_summary.json`; all figures but the peak are means per profiled step.

    Args:
        steps: numbers of the profiled steps.
    """
    trace, n = account.trace, len(steps)
    made = _grouped(trace.allocations, lambda a: (a.op, a.phase))
    return {
        "steps": list(steps),
        "peak": _peak(account, steps),
        "phases": {phase: _phase(trace, phase, n) for phase in (*PHASES, OUTSIDE)},
        "allocations": [
            {
                "op": op, "phase": phase, "bytes": _bytes(group) // n, "count": len(group) / n,
                "largest": max(a.n_bytes for a in group),
                "where": max(group, key=lambda a: a.n_bytes).source_line,
            }
            for (op, phase), group in sorted(made.items(), key=lambda item: -_bytes(item[1]))[:TOP]
        ],
        "ops": {phase: _ops(trace, phase, n) for phase in (*PHASES, OUTSIDE)},
    }  # fmt: skip


def _peak(account: Account, steps: Sequence[int]) -> dict[str, Any]:
    time, level = account.times[account.peak], account.levels[account.peak]
    live = [a for a in account.trace.allocations if a.start <= time < a.end]
    groups = _grouped(live, lambda a: (a.op, a.phase, account.category[a]))
    ended = [end for _, end, _ in account.trace.runs("optimizer")]
    return {
        "bytes": sum(level),
        "step": steps[min(bisect_left(ended, time), len(steps) - 1)],
        "phase": account.trace.phase_at(time),
        "time_ms": round((time - account.times[0]) / 1e3, 3),
        "categories": dict(zip(CATEGORIES, level, strict=True)),
        "live": [
            {"op": op, "phase": made_in, "category": category, "bytes": _bytes(group), "count": len(group)}
            for (op, made_in, category), group in sorted(groups.items(), key=lambda item: -_bytes(item[1]))[:TOP]
        ],
    }


def _phase(trace: Trace, phase: str, n_steps: int) -> dict[str, Any]:
    ms = sum(end - start for start, end, _ in trace.runs(phase)) / 1e3 / n_steps
    made = [a for a in trace.allocations if a.phase == phase]
    return {
        "ms": None if phase == OUTSIDE else round(ms, 3),
        "bytes": _bytes(made) // n_steps,
        "count": len(made) / n_steps,
    }


def _ops(trace: Trace, phase: str, n_steps: int) -> list[dict[str, Any]]:
    """Operators sorted by device time if any launched kernels, else by self time on the CPU."""
    groups = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])
    for op in trace.ops:
        if op.phase == phase:
            entry = groups[op.name]
            entry[0] += op.self_us
            entry[1] += op.device_us
            entry[2] += 1
    main = 1 if any(entry[1] for entry in groups.values()) else 0
    return [
        {
            "op": name,
            "self_us": round(self_us / n_steps, 1),
            "device_us": round(device / n_steps, 1),
            "count": count / n_steps,
        }
        for name, (self_us, device, count) in sorted(groups.items(), key=lambda item: -item[1][main])[:TOP]
    ]


def _grouped(
    allocations: Iterable[ProfiledAllocation], key: Callable[[ProfiledAllocation], _Key]
) -> dict[_Key, list[ProfiledAllocation]]:
    groups = defaultdict[_Key, list[ProfiledAllocation]](list)
    for allocation in allocations:
        groups[key(allocation)].append(allocation)
    return groups


def _bytes(allocations: Iterable[ProfiledAllocation]) -> int:
    return sum(a.n_bytes for a in allocations)
