"""What was planned, beside what was measured. The plan's file is another program's: any field may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..memory.rows import KINDS, RankRow
from .figures import COLOURS
from .html import LINES, Figure, unit_of
from .measure import REST, phase_peaks
from .read import Gather, mapping, number, sequence
from .traced import categories_of, peak_of


@dataclass(frozen=True)
class Compared:
    """A predicted figure beside what was measured, in bytes; either may be missing."""

    rank: int
    what: str
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

    A plan names several ranks in `ranks`, or is itself about one. It holds for the other ranks of the same size, too.
    """
    rows = {row.identity.rank: row for row in gathers[-1].rows} if gathers else {}
    found: list[Compared] = []
    for rank, entry in sorted(_planned(plan, rows).items()):
        row, trace = rows.get(rank), mapping(traces.get(rank))
        found += _peaks(rank, entry, row, trace)
        found += _phases(rank, entry, row, gathers)
        found += _categories(rank, entry, row, trace)
    return [c for c in found if c.predicted is not None]


def _planned(plan: Mapping[str, Any], rows: Mapping[int, RankRow]) -> dict[int, Mapping[str, Any]]:
    """What was planned for each rank: of one that was not planned itself, for a rank that holds as much of all state.

    Ranks differ by nothing but the sizes of their shards.
    """
    own = {
        int(rank): entry
        for entry in map(mapping, sequence(plan.get("ranks")) or [plan])
        if (rank := number(entry.get("rank"))) is not None
    }
    found = dict(own)
    for rank, row in rows.items():
        alike = (other for other in own if other in rows and rows[other].state == row.state)
        if rank not in own and row.state is not None and (like := next(alike, None)) is not None:
            found[rank] = own[like]
    return found


def _peaks(rank: int, entry: Mapping[str, Any], row: RankRow | None, trace: Mapping[str, Any]) -> list[Compared]:
    peak, device = mapping(entry.get("peak")), row.device_mem if row else None
    allocated = number(peak_of(trace).get("bytes")) if device is None else float(device.peak_allocated)
    on_host = sum(held.host for held in row.state.values()) if row and row.state else None
    found = [
        Compared(rank, "peak allocated", number(peak.get("allocated")), allocated),
        Compared(rank, "tensors on the host", number(entry.get("host_peak")) or None, on_host),
    ]
    if device is not None:  # the CPU's allocator keeps nothing in reserve
        found.insert(1, Compared(rank, "peak reserved", number(peak.get("reserved")), device.peak_reserved))
    return found


def _phases(rank: int, entry: Mapping[str, Any], row: RankRow | None, gathers: Sequence[Gather]) -> list[Compared]:
    if row is None or row.device_mem is None:  # the CPU's allocator has no peaks to compare with
        return []
    measured = phase_peaks(gathers, rank)
    return [
        Compared(rank, f"allocated in {phase}", number(mapping(figures).get("allocated")), measured.get(phase))
        for phase, figures in mapping(entry.get("phases")).items()
    ]


def _categories(rank: int, entry: Mapping[str, Any], row: RankRow | None, trace: Mapping[str, Any]) -> list[Compared]:
    at_peak = categories_of(trace)
    state = {kind: held.device for kind, held in (row.state or {}).items()} if row else {}
    found = []
    for kind, figures in mapping(entry.get("categories")).items():
        predicted = number(mapping(figures).get("device"))
        measured = at_peak.get(kind, state.get(kind))  # type: ignore[call-overload]
        if predicted or measured:
            found.append(Compared(rank, f"{kind} on the device", predicted, measured))
    if row is not None and row.unattributed is not None and not at_peak:
        rest = [mapping(f).get("device") for kind, f in mapping(entry.get("categories")).items() if kind not in KINDS]
        together = sum(number(n_bytes) or 0 for n_bytes in rest)
        found.append(Compared(rank, "no state, together", together or None, row.unattributed))
    return found


def predicted(found: Sequence[Compared], what: str = "peak allocated") -> Figure:
    """Bars of one figure, predicted beside measured, for every rank."""
    own = [c for c in found if c.what == what and (c.predicted is not None or c.measured is not None)]
    unit, scale = unit_of(v for c in own for v in (c.predicted, c.measured))
    data = [
        {
            "type": "bar", "name": name, "x": [f"rank {c.rank}" for c in own], "marker": {"color": colour},
            "y": [None if (v := getattr(c, name)) is None else v / scale for c in own],
            "hovertemplate": f"%{{y:.6g}} {unit}",
        }
        for name, colour in (("predicted", COLOURS[REST]), ("measured", LINES[0]))
    ]  # fmt: skip
    layout = {"barmode": "group", "height": 300, "yaxis": {"title": {"text": f"{what}, {unit}"}, "rangemode": "tozero"}}
    return Figure(data if own else [], layout, "the plan names no rank")
