"""The traced step and the plan: their plots, and the rows of their tables. Both files are other programs': any field
may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..memory.rows import RankRow
from .figures import COLOURS, LINES, PHASE_COLOURS, Figure, label, unit_of
from .measure import REST, phase_peaks
from .read import Gather, mapping, number, sequence

BANDS = 400
"""At most so many module bands are drawn, the longest."""
LANES = 6


@dataclass(frozen=True)
class Band:
    """A stretch of events in which one module ran; `lane` is its depth below the modules that it runs in."""

    module: str
    phase: str
    begin: float
    end: float
    lane: int


def peak_of(trace: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(trace.get("peak"))


def categories_of(trace: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by category at the instant of the traced peak."""
    return _categories_at(peak_of(trace))


def by_phase(trace: Mapping[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes by category at the peak of each phase, with the module that ran then."""
    found = {str(phase): mapping(peak) for phase, peak in mapping(trace.get("phases")).items()}
    return {phase: {str(peak.get("module") or "–"): _categories_at(peak)} for phase, peak in found.items()}


def _categories_at(peak: Mapping[str, Any]) -> dict[str, int]:
    found = mapping(peak.get("categories"))
    return {str(kind): int(n_bytes) for kind, n_bytes in found.items() if number(n_bytes) is not None}


def timeline(trace: Mapping[str, Any]) -> Figure:
    """Bytes alive by category over the events of a step, above the modules that ran."""
    points = [
        p for p in sequence(trace.get("timeline")) if isinstance(p, list) and len(p) == 2 and None not in map(number, p)
    ]
    if not points:
        return Figure([], {}, "the trace holds no timeline")
    events, totals = [p[0] for p in points], [p[1] for p in points]
    unit, scale = unit_of(totals)
    stack = {str(kind): sequence(values) for kind, values in mapping(trace.get("stack")).items()}
    whole = {kind: values for kind, values in stack.items() if len(values) == len(events) and any(values)}
    order = [k for k in COLOURS if k in whole] + [k for k in whole if k not in COLOURS]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "memory", "name": label(kind.replace("_", " ")),
            "x": events, "y": [(number(v) or 0) / scale for v in whole[kind]],
            "line": {"width": 0, "shape": "hv"}, "fillcolor": COLOURS.get(kind, LINES[0]),
            "hovertemplate": f"%{{y:.6g}} {unit}",
        }
        for kind in order
    ]  # fmt: skip
    data.append(
        {
            "type": "scatter", "mode": "lines", "name": "total", "x": events, "y": [t / scale for t in totals],
            "line": {"color": "#222222", "width": 1, "shape": "hv"}, "hovertemplate": f"%{{y:.6g}} {unit}",
        }
    )  # fmt: skip
    found = bands(trace)
    data += _drawn(found)
    layout: dict[str, Any] = {
        "height": 520, "barmode": "overlay", "uniformtext": {"minsize": 10, "mode": "hide"},
        "xaxis": {"title": {"text": "allocation event"}},
        "yaxis": {"title": {"text": unit}, "domain": [0.32, 1] if found else [0, 1], "rangemode": "tozero"},
    }  # fmt: skip
    if found:
        layout["xaxis"]["anchor"] = "y2"
        lanes = max(band.lane for band in found) + 1
        layout["yaxis2"] = {
            "title": {"text": "modules"}, "domain": [0, 0.28], "range": [lanes - 0.4, -0.6], "showticklabels": False,
            "fixedrange": True,
        }  # fmt: skip
    return Figure(data, layout)


def bands(trace: Mapping[str, Any]) -> list[Band]:
    """The longest bands of modules, each in the lane of its depth."""
    found = []
    for band in map(mapping, sequence(trace.get("bands"))):
        begin, end = number(band.get("begin")), number(band.get("end"))
        if begin is not None and end is not None and end >= begin:
            found.append((begin, end, str(band.get("module", "")), str(band.get("phase", ""))))
    longest = sorted(found, key=lambda b: b[0] - b[1])[:BANDS]
    placed, open_until = [], list[float]()
    for begin, end, module, phase in sorted(longest, key=lambda b: (b[0], -b[1])):
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        if len(open_until) < LANES:
            placed.append(Band(module, phase, begin, end, len(open_until)))
        open_until.append(end)
    return placed


def _drawn(found: Sequence[Band]) -> list[dict[str, Any]]:
    """One trace of bars per phase, so that the legend can hide it."""
    drawn = []
    for phase in dict.fromkeys(band.phase for band in found):
        own = [band for band in found if band.phase == phase]
        # The optimizer's step belongs to no module, whichever ran last.
        names = [label(phase if phase == "step" else band.module or "(whole model)") for band in own]
        drawn.append(
            {
                "type": "bar", "orientation": "h", "yaxis": "y2", "name": label(phase or "modules"),
                "base": [band.begin for band in own], "x": [band.end - band.begin for band in own],
                "y": [band.lane for band in own], "text": names, "textposition": "inside", "insidetextanchor": "start",
                "constraintext": "inside", "width": 0.9,
                "marker": {"color": PHASE_COLOURS.get(phase, "#cccccc"), "line": {"color": "#ffffff", "width": 1}},  # type: ignore[call-overload]
                "hovertemplate": "%{text}<br>events %{base} to %{x}",
            }
        )  # fmt: skip
    return drawn


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
    """Every figure that the plan predicts and the run could measure: peaks, phases on a GPU, categories of state.

    A plan names several ranks in `ranks`, or is itself about one.
    """
    rows = {row.identity.rank: row for row in gathers[-1].rows} if gathers else {}
    found: list[Compared] = []
    for entry in map(mapping, sequence(plan.get("ranks")) or [plan]):
        rank = number(entry.get("rank"))
        if rank is None:
            continue
        row, trace = rows.get(int(rank)), mapping(traces.get(int(rank)))
        found += _peaks(int(rank), entry, row, trace)
        found += _phases(int(rank), entry, row, gathers)
        found += _categories(int(rank), entry, row, trace)
    return [c for c in found if c.predicted is not None]


def _peaks(rank: int, entry: Mapping[str, Any], row: RankRow | None, trace: Mapping[str, Any]) -> list[Compared]:
    peak, device = mapping(entry.get("peak")), row.device_mem if row else None
    allocated = number(peak_of(trace).get("bytes")) if device is None else float(device.peak_allocated)
    on_host = sum(held.host for held in row.state.values()) if row and row.state else None
    return [
        Compared(rank, "peak allocated", number(peak.get("allocated")), allocated),
        Compared(rank, "peak reserved", number(peak.get("reserved")), None if device is None else device.peak_reserved),
        Compared(rank, "tensors on the host", number(entry.get("host_peak")) or None, on_host),
    ]


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
