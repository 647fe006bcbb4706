"""Memory that grows with every step: kept graphs, histories, caches. From an allocator's events and the steps' ends.

A step's tensors are gone when the next one has ended. What is made once (optimizer states, caches, the first batch of a
prefetcher) was born in an early step. So a list that grows leaves tensors of each of the last steps behind. A tensor
that is replaced by a longer one leaves none; its line holds more at the end of each step, and no other line makes as
much more.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shardkit_tensors import line_of, source_line  # type: ignore[import-not-found]

STEPS = 9
"""Steps after which growth shows. A program whose memory rose is rehearsed for so many."""
RECENT = 2
"""Last steps that do not count: their tensors may still be in use, as a prefetched batch or the last loss is."""
COUNTED = 4
"""Steps before those, each of which must have left something behind."""
SMALLEST = 0.002
"""The part of the peak that a step must leave behind to be told: lists of losses grow, too, and fill no card."""


def is_likely(over_time: Sequence[Mapping[str, Any]]) -> bool:
    """Whether more steps are worth their time: some step ended with more memory than the one before."""
    sizes = [sample["allocated"] for sample in over_time]
    return any(after > before + SMALLEST * max(sizes) for before, after in pairwise(sizes))


def growth(events: Sequence[Mapping[str, Any]], ends_us: Sequence[int], peak: int) -> dict[str, Any]:
    """Bytes that each step leaves behind, and the line that made most of them; empty where memory does not grow.

    `events`: an allocator's whole history. `ends_us`: when each step ended. `peak`: bytes allocated at the peak.
    """
    if len(ends_us) < COUNTED + RECENT + 1:
        return {}
    alive: dict[int, Mapping[str, Any]] = {}
    held: list[Counter[tuple[str, int]]] = []  # by line, at the end of each step
    made: list[Counter[tuple[str, int]]] = []  # in each step
    flow = Counter[tuple[str, int]]()
    for event in [*events, {"action": "end", "time_us": ends_us[-1] + 1}]:
        while len(held) < len(ends_us) and event["time_us"] > ends_us[len(held)]:
            lines = Counter[tuple[str, int]]()
            for allocation in alive.values():
                lines[line_of(allocation["frames"])] += allocation["size"]
            held.append(lines)
            made.append(flow)
            flow = Counter()
        if len(held) == len(ends_us):
            break
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            flow[line_of(event["frames"])] += event["size"]
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    return _left_behind(alive.values(), ends_us, peak) or _replaced(held, made, peak)


def _left_behind(alive: Any, ends_us: Sequence[int], peak: int) -> dict[str, Any]:
    """Growth of lists: lines of which tensors of each counted step outlived it."""
    last = len(ends_us) - RECENT
    left = {step: Counter[tuple[str, int]]() for step in range(last - COUNTED, last)}
    for event in alive:
        step = bisect.bisect_left(ends_us, event["time_us"])
        if step in left:
            left[step][line_of(event["frames"])] += event["size"]
    always = set.intersection(*map(set, left.values()))  # a cache that was filled in one of them grew once
    sizes = [sum(lines[line] for line in always) for lines in left.values()]
    if min(sizes) <= SMALLEST * peak:
        return {}
    most = max(always, key=lambda line: sum(lines[line] for lines in left.values()))
    return {
        "bytes_a_step": sum(sizes) // len(sizes), "first_step": last - COUNTED + 1, "last_step": last,
        "source_line": source_line(*most),
    }  # fmt: skip


def _replaced(
    held: Sequence[Counter[tuple[str, int]]], made: Sequence[Counter[tuple[str, int]]], peak: int
) -> dict[str, Any]:
    """Growth of one tensor: its line holds more at the end of every counted step.

    A batch that gets longer with every step does so as well; there other lines make as much more.
    """
    first = len(held) - COUNTED - 1
    for line, _ in held[-1].most_common():
        sizes = [lines[line] for lines in held[first:]]
        if not all(after > before + SMALLEST * peak for before, after in pairwise(sizes)):
            continue
        flows = ([flow[other] for flow in made[first:]] for other in made[-1] if other != line)
        rising = (flow[-1] / flow[0] for flow in flows if flow[0] and all(a < b for a, b in pairwise(flow)))
        if sizes[-1] > 1.05 * sizes[0] * max(rising, default=1.0):
            return {
                "bytes_a_step": (sizes[-1] - sizes[0]) // COUNTED, "first_step": first + 2, "last_step": len(held),
                "source_line": source_line(*line),
            }  # fmt: skip
    return {}
