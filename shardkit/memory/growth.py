"""Device memory that grows with every step: kept graphs, lists of outputs, caches without a limit."""

from __future__ import annotations

import linecache
import os
from collections import Counter, deque
from itertools import pairwise

import torch

from .rows import RankRow
from .tracing.compat import allocator_snapshot, keep_stacks

GATHERS = 7
"""Gathers that growth is read from. Held batches of any length rise that often in a row in one of 5,040 runs."""
SMALLEST = 0.002
"""The part of the peak that must come with each gather: lists of losses grow, too, and fill no card."""
UNEVEN = 5
"""A leak leaves about as much behind in each step; a cache that warms up leaves less and less."""
MOST_CHARACTERS = 300
"""Of the line that makes what stays; a row of the ledger has a fixed size."""
BEFORE, AFTER = 2, 6
"""Steps after which the lines of live tensors are compared, once memory grows. What a step leaves to the next one only,
as its loss or a prefetched batch, is there at both ends."""
_BENEATH = (
    os.path.join("site-packages", "torch", ""),
    os.path.dirname(os.__file__) + "/",
    __package__.replace(".", "/"),
)


class Growth:
    """Compares a rank's memory at the ends of steps, from gather to gather."""

    def __init__(self) -> None:
        # that each of the last steps left behind on the device; `None` if memory does not grow
        self.bytes_a_step: int | None = None
        # `FILE:NUMBER: TEXT` of the line that makes most of them; `None` before it was looked for
        self.line: str | None = None
        self._n_looked = 0  # steps since the allocator keeps stacks
        self._earlier: Counter[tuple[str, int]] = Counter()
        self._gathers: deque[tuple[int, int, int]] = deque(maxlen=GATHERS)

    def add(self, step: int, row: RankRow) -> None:
        if row.device_mem is None or step <= 2:  # the first steps create optimizer states and buffers
            return
        allocated = row.device_mem.allocated
        peaks = [row.phases[name].peak_allocated or 0 for name in ("forward", "backward") if name in row.phases]
        self._gathers.append((step, allocated, max(peaks, default=allocated)))
        self.bytes_a_step = self._read(row.device_mem.peak_allocated)

    def end_step(self, device: torch.device) -> None:
        """Look for the line once memory grows: stacks cost each allocation some microseconds for these steps."""
        if self.line or (self.bytes_a_step is None and self._n_looked == 0):
            return
        if self._n_looked == 0 and not keep_stacks(True):
            return  # the profiler records just now
        if self._n_looked == BEFORE:
            self._earlier = _alive(device)
        self._n_looked += 1
        if self._n_looked > AFTER:
            grown = _alive(device)
            keep_stacks(False)
            grown.subtract(self._earlier)
            (path, number), n_bytes = max(grown.items(), key=lambda entry: entry[1], default=(("", 0), 0))
            # Less than half of the growth is another line's, or that of memory without a stack.
            if self.bytes_a_step and n_bytes > (AFTER - BEFORE) * self.bytes_a_step / 2:
                self.line = f"{path}:{number}: {linecache.getline(path, number).strip()}"[:MOST_CHARACTERS]
            self._n_looked = 0

    def _read(self, peak: int) -> int | None:
        if len(self._gathers) < GATHERS:
            return None
        (first_step, first, _), *_, (last_step, last, _) = self._gathers
        rates = [(after - before) / (end - begin) for (begin, before, _), (end, after, _) in pairwise(self._gathers)]
        rises = [after - before for (_, before, _), (_, after, _) in pairwise(self._gathers)]
        if min(rises) <= SMALLEST * peak or max(rates) > UNEVEN * min(rates):
            return None
        # Batches that get longer and longer hold more at the end of a step, too, and use still more within it. A leak
        # that is smaller than half of that cannot be told from what the batches hold.
        within = [at_peak - allocated for _, allocated, at_peak in self._gathers]
        if all(after > before for before, after in pairwise(within)) and within[-1] - within[0] > (last - first) / 2:
            return None
        return (last - first) // (last_step - first_step)


def _alive(device: torch.device) -> Counter[tuple[str, int]]:
    """Bytes of the live tensors whose stack was kept, by the innermost line of the program."""
    lines = Counter[tuple[str, int]]()
    for segment in allocator_snapshot(device.index)["segments"]:
        for block in segment["blocks"]:
            frames = block.get("frames") or [] if block["state"] == "active_allocated" else []
            by_program = (frame for frame in frames if not any(part in frame["filename"] for part in _BENEATH))
            if (frame := next(by_program, None)) is not None:
                lines[frame["filename"], frame["line"]] += block["size"]
    return lines
