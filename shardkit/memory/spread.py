"""All ranks in a few numbers: the largest, the smallest, the skew, the worst rank, the stragglers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .rows import RankRow

SLOW = 1.2
"""A rank that is busy for more than this multiple of the median is called slow."""
NOTICEABLE = 0.1
"""... if the difference is more than this share of a step: the rest is noise."""
SHOWN_SINGLY = 16
"""Up to this many ranks, every one is shown; above that, only the `WORST` and the `BEST`."""
WORST, BEST = 8, 2

_METRICS: dict[str, Callable[[RankRow], float | None]] = {
    "peak_allocated": lambda row: None if row.device_mem is None else row.device_mem.peak_allocated,
    "peak_reserved": lambda row: None if row.device_mem is None else row.device_mem.peak_reserved,
    "peak_rss": lambda row: row.host_mem.peak_rss,
    "state": lambda row: row.state_total,
    "step_time_s": lambda row: row.step_time_s,
}


LABELS = {
    "peak_allocated": "peak allocated",
    "peak_reserved": "peak reserved",
    "peak_rss": "peak RSS",
    "state": "state",
    "step_time_s": "step time",
}
"""Metric → its name for people."""


@dataclass(frozen=True)
class Spread:
    """One figure over all ranks; `skew` = max / mean, `worst` = the rank with the largest, as `rank@host`."""

    max: float
    min: float
    mean: float
    skew: float
    worst: str


@dataclass(frozen=True)
class Straggler:
    """A rank that is busy for longer than `SLOW` × the median in a step; `ratio` = its time / median."""

    name: str
    busy_s: float
    ratio: float


@dataclass(frozen=True)
class Summary:
    """Spreads by metric (peak_allocated, peak_reserved, peak_rss, state, step_time_s; absent if no rank has it).

    Attributes:
        spreads: over all ranks.
        nodes: over the ranks of each host, in the order of their first ranks.
    """

    spreads: Mapping[str, Spread]
    stragglers: Sequence[Straggler]
    nodes: Mapping[str, Mapping[str, Spread]]

    @property
    def peak(self) -> tuple[str, Spread] | None:
        """The metric to compare ranks by, and its spread: peak allocated on a device, peak RSS on the CPU."""
        candidates = ((name, self.spreads[name]) for name in ("peak_allocated", "peak_rss") if name in self.spreads)
        return next(candidates, None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summary(rows: Sequence[RankRow]) -> Summary:
    """Condense one gather's rows."""
    hosts: dict[str, list[RankRow]] = {}
    for row in rows:
        hosts.setdefault(row.identity.host, []).append(row)
    return Summary(_spreads(rows), _stragglers(rows), {host: _spreads(host_rows) for host, host_rows in hosts.items()})


def pressure(row: RankRow) -> float:
    """The figure that ranks are ordered by: peak allocated on a device, peak RSS on the CPU."""
    return row.host_mem.peak_rss if row.device_mem is None else row.device_mem.peak_allocated


def _spreads(rows: Sequence[RankRow]) -> dict[str, Spread]:
    spreads = {}
    for name, metric in _METRICS.items():
        values = [(value, row.name) for row in rows if (value := metric(row)) is not None]
        if values:
            numbers = [number for number, _ in values]
            largest, worst = max(values, key=lambda pair: pair[0])
            mean = sum(numbers) / len(numbers)
            spreads[name] = Spread(largest, min(numbers), mean, largest / mean if mean else 1.0, worst)
    return spreads


def _stragglers(rows: Sequence[RankRow]) -> list[Straggler]:
    times = [(row.busy_s, row.name, row.step_time_s or row.busy_s) for row in rows if row.busy_s is not None]
    if not times:
        return []
    middle = median(seconds for seconds, _, _ in times)
    slow = [
        Straggler(name, seconds, seconds / middle)
        for seconds, name, step in times
        if seconds > SLOW * middle > 0 and seconds - middle > NOTICEABLE * step
    ]
    return sorted(slow, key=lambda straggler: -straggler.ratio)
