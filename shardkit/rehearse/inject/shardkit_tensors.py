"""The tensors that a rank held at its peak of memory, by the line that made them: from torch's own history."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardkit_categories import BENEATH  # type: ignore[import-not-found]

MOST_EVENTS = 200_000
"""Events that the history holds, of a KiB or so each; a rank with more has no lines."""
LINES = 8
"""Lines that are recorded, those with most bytes."""


def record_history(torch: Any) -> None:
    """Let torch's allocator remember its events, from the moment in which the process first uses CUDA.

    A recording of the program's own would take this one's place; its snapshots are of this one.
    """
    record = torch.cuda.memory._record_memory_history

    def begin() -> None:
        record("all", context="alloc", stacks="python", max_entries=MOST_EVENTS)

    def leave_as_it_is(*_: Any, **__: Any) -> None:
        pass

    leave_as_it_is.record = record  # type: ignore[attr-defined]
    torch.cuda.memory._record_memory_history = leave_as_it_is
    torch.cuda._lazy_call(begin)


def histories(torch: Any) -> dict[str, list[dict[str, Any]]]:
    """Device → the events of its allocator."""
    traces = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history.record(None)
    return {str(device): events for device, events in enumerate(traces) if events}


def is_whole(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a history has the first events, too: when it is full, each event takes the place of the oldest."""
    return len(events) < MOST_EVENTS


def at_peak(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The allocations of an allocator's history that were there when most was allocated."""
    allocations: dict[int, Mapping[str, Any]] = {}
    allocated = most = until = 0
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            allocations[event["addr"]] = event
            allocated += event["size"]
            if allocated > most:
                most, until = allocated, index + 1
        elif event["action"] == "free_requested" and allocations.pop(event["addr"], None) is not None:
            allocated -= event["size"]
    allocations.clear()
    for event in events[:until]:
        if event["action"] == "alloc":
            allocations[event["addr"]] = event
        elif event["action"] == "free_requested":
            allocations.pop(event["addr"], None)
    return list(allocations.values())


def by_line(allocations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bytes and number of allocations of each line, those with most bytes first."""
    n_bytes, numbers = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for allocation in allocations:
        line = line_of(allocation.get("frames", ()))
        n_bytes[line] += allocation["size"]
        numbers[line] += 1
    rows = []
    for (filename, number), size in n_bytes.most_common(LINES):
        rows.append({
            "source_line": source_line(filename, number), "n_bytes": size, "tensors": numbers[filename, number],
        })  # fmt: skip
    return rows


def source_line(filename: str, number: int) -> str:
    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}: {text}" if filename else "backward, or another thread without Python"


def line_of(frames: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """File and number of a stack's line, innermost first: the program's, else the innermost; ("", 0) without one."""
    for frame in frames:
        if not any(part in frame["filename"] for part in BENEATH):
            return frame["filename"], frame["line"]
    return (frames[0]["filename"], frames[0]["line"]) if frames else ("", 0)
