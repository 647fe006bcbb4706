"""Predicted beside measured memory. Another program may have written the plan: any field may be missing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShardkitError, gib
from ..memory.rows import KINDS, RankRow, phase_name, pressure
from .figures import COLOURS, bar
from .html import LINES, Figure, unit_of
from .measure import UNATTRIBUTED, phase_peaks
from .read import Gather, Run, mapping, number, read_run, sequence
from .traced import categories_of, peak_of

PEAK = "peak allocated"


@dataclass(frozen=True)
class Compared:
    """A predicted and a measured figure in bytes; either may be missing."""

    rank: int
    figure: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """(predicted − measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


def compared(
    plan: Mapping[str, Any], gathers: Sequence[Gather], traces: Mapping[int, Mapping[str, Any]]
) -> list[Compared]:
    """Every figure that the plan predicts and the run could measure: peaks, phases on a GPU, categories.

    A plan lists several ranks in `ranks`, or describes one rank. It also holds for other ranks with equal shards.
    """
    rows = {row.identity.rank: row for row in gathers[-1].rows} if gathers else {}
    comparisons: list[Compared] = []
    for rank, entry in sorted(_planned(plan, rows).items()):
        row, trace = rows.get(rank), mapping(traces.get(rank))
        peak, device = mapping(entry.get("peak")), row.device_mem if row else None
        allocated = number(peak_of(trace).get("bytes")) if device is None else float(device.peak_allocated)
        comparisons.append(Compared(rank, PEAK, number(peak.get("allocated")), allocated))
        if device is not None:  # the CPU's allocator reserves nothing
            comparisons.append(Compared(rank, "peak reserved", number(peak.get("reserved")), device.peak_reserved))
        on_host = sum(n_bytes.host for n_bytes in row.state.values()) if row and row.state else None
        comparisons.append(Compared(rank, "tensors on the host", number(entry.get("host_peak")) or None, on_host))
        if device is not None:  # nor does it record the peaks of phases
            measured = phase_peaks(gathers, rank)
            for phase, figures in mapping(entry.get("phases")).items():
                name, bytes_planned = phase_name(phase), number(mapping(figures).get("allocated"))
                comparisons.append(Compared(rank, f"allocated in {name}", bytes_planned, measured.get(name)))
        comparisons += _categories(rank, entry, row, trace)
    return [c for c in comparisons if c.predicted is not None]


def _planned(plan: Mapping[str, Any], rows: Mapping[int, RankRow]) -> dict[int, Mapping[str, Any]]:
    """The plan of each rank; an unplanned rank takes the plan of a rank with the same bytes of state.

    Ranks differ only in the sizes of their shards.
    """
    entries = map(mapping, sequence(plan.get("ranks")) or [plan])
    plans = {int(rank): entry for entry in entries if (rank := number(entry.get("rank"))) is not None}
    by_rank = dict(plans)
    for rank, row in rows.items():
        alike = (planned for planned in plans if planned in rows and rows[planned].state == row.state)
        if rank not in plans and row.state is not None and (like := next(alike, None)) is not None:
            by_rank[rank] = plans[like]
    return by_rank


def _categories(rank: int, entry: Mapping[str, Any], row: RankRow | None, trace: Mapping[str, Any]) -> list[Compared]:
    at_peak = categories_of(trace)
    state = {kind: n_bytes.device for kind, n_bytes in (row.state or {}).items()} if row else {}
    comparisons = []
    for kind, figures in mapping(entry.get("categories")).items():
        predicted = number(mapping(figures).get("device"))
        measured = at_peak.get(kind, state.get(kind))  # type: ignore[call-overload]
        if predicted or measured:
            comparisons.append(Compared(rank, f"{kind} on the device", predicted, measured))
    if row is not None and row.unattributed is not None and not at_peak:
        categories = mapping(entry.get("categories"))
        not_state = (mapping(figures).get("device") for kind, figures in categories.items() if kind not in KINDS)
        together = sum(number(n_bytes) or 0 for n_bytes in not_state)
        comparisons.append(Compared(rank, "all but state", together or None, row.unattributed))
    return comparisons


def predicted(comparisons: Sequence[Compared]) -> Figure:
    """Bars of the peak, predicted beside measured, for every rank."""
    peaks = [c for c in comparisons if c.figure == PEAK]
    shown = [c for c in peaks if c.predicted is not None or c.measured is not None]
    unit, scale = unit_of(v for c in shown for v in (c.predicted, c.measured))
    ranks = [f"rank {c.rank}" for c in shown]
    traces = [
        bar(name, ranks, [None if (v := getattr(c, name)) is None else v / scale for c in shown], colour, unit)
        for name, colour in (("predicted", COLOURS[UNATTRIBUTED]), ("measured", LINES[0]))
    ]
    axis = {"title": {"text": f"{PEAK}, {unit}"}, "rangemode": "tozero"}
    layout = {"barmode": "group", "height": 300, "yaxis": axis}
    return Figure(traces if shown else [], layout, "the plan names no rank")


RANKS = 4
"""At most this many ranks get a column."""
_LOG = logging.getLogger(__name__)


def close(run_dir: Path) -> None:
    """Print a planned run beside its plan; on rank 0. Errors are only warnings: the run itself has succeeded."""
    try:
        run = read_run(run_dir)
        if run.plan is not None and run.gathers:
            print(beside(compared(run.plan, run.gathers, run.traces), run))
    except (ShardkitError, OSError) as error:
        _LOG.warning("this run is not compared with its plan: %s", error)


def beside(comparisons: Sequence[Compared], run: Run) -> str:
    """One line per predicted figure with the ranks' measurements; of many ranks those under most memory pressure."""
    from ..plan.show import columns  # a report without a plan need not load the planner

    compared_ranks = {c.rank for c in comparisons}
    ranks = [row for row in run.last_rows if row.identity.rank in compared_ranks]
    ranks = sorted(sorted(ranks, key=pressure, reverse=True)[:RANKS], key=lambda row: row.identity.rank)
    lines = [("", "predicted", *(f"rank {row.name}" for row in ranks))]
    by_name = {(c.figure, c.rank): c for c in comparisons}
    for figure in dict.fromkeys(c.figure for c in comparisons):
        cells = [by_name.get((figure, row.identity.rank)) for row in ranks]
        predicted = next((c.predicted for c in cells if c is not None and c.predicted is not None), 0.0)
        lines.append((figure, gib(predicted), *map(_cell, cells)))
    return "\n".join(columns(lines))


def _cell(comparison: Compared | None) -> str:
    if comparison is None or comparison.measured is None:
        return "–"
    return gib(comparison.measured) + ("" if comparison.error is None else f" ({comparison.error:+.1%})")
