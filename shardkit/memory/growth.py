"""Device memory that grows with every step: kept graphs, lists of outputs, caches without a limit."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from .rows import RankRow

GATHERS = 7
"""Gathers that growth is read from. Held batches of any length rise that often in a row in one of 5,040 runs."""
SMALLEST = 0.002
"""The part of the peak that must come with each gather: lists of losses grow, too, and fill no card."""
UNEVEN = 5
"""A leak leaves about as much behind in each step; a cache that warms up leaves less and less."""


class Growth:
    """Compares a rank's memory at the ends of steps, from gather to gather."""

    def __init__(self) -> None:
        # that each of the last steps left behind on the device; `None` if memory does not grow
        self.bytes_a_step: int | None = None
        self._gathers: deque[tuple[int, int, int]] = deque(maxlen=GATHERS)

    def add(self, step: int, row: RankRow) -> None:
        if row.device_mem is None or step <= 2:  # the first steps create optimizer states and buffers
            return
        allocated = row.device_mem.allocated
        peaks = [row.phases[name].peak_allocated or 0 for name in ("forward", "backward") if name in row.phases]
        self._gathers.append((step, allocated, max(peaks, default=allocated)))
        self.bytes_a_step = self._read(row.device_mem.peak_allocated)

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
