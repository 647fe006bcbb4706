"""The traced step's plots and table rows. Another program may have written the file: any field may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..memory.rows import phase_name
from .figures import COLOURS, PHASE_COLOURS
from .html import LINES, Figure, label, unit_of
from .read import mapping, number, sequence

BANDS = 400
"""Most module bands to draw; the longest are kept."""
LANES = 6


@dataclass(frozen=True)
class Band:
    """A stretch of events in which one module ran; `lane` is its nesting depth."""

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
    """Bytes by category at the peak of each phase, by the module that ran then."""
    peaks = {phase_name(str(phase)): mapping(peak) for phase, peak in mapping(trace.get("phases")).items()}
    return {phase: {str(peak.get("module") or "–"): _categories_at(peak)} for phase, peak in peaks.items()}


def _categories_at(peak: Mapping[str, Any]) -> dict[str, int]:
    by_kind = mapping(peak.get("categories"))
    return {str(kind): int(n_bytes) for kind, n_bytes in by_kind.items() if number(n_bytes) is not None}


def timeline(trace: Mapping[str, Any]) -> Figure:
    """Bytes alive by category over the events of a step, above the modules that ran."""
    points = [
        p for p in sequence(trace.get("timeline")) if isinstance(p, list) and len(p) == 2 and None not in map(number, p)
    ]
    if not points:
        return Figure([], {}, "the trace holds no timeline")
    events, totals = [p[0] for p in points], [p[1] for p in points]
    unit, scale = unit_of(totals)
    stack = {str(kind): sequence(heights) for kind, heights in mapping(trace.get("stack")).items()}
    complete = {kind: heights for kind, heights in stack.items() if len(heights) == len(events) and any(heights)}
    order = [k for k in COLOURS if k in complete] + [k for k in complete if k not in COLOURS]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "memory", "name": label(kind.replace("_", " ")),
            "x": events, "y": [(number(v) or 0) / scale for v in complete[kind]],
            "line": {"width": 0, "shape": "hv"}, "fillcolor": COLOURS.get(kind, LINES[0]),
            "hovertemplate": f"%{{y:.6g}} {unit}",
        }
        for kind in order
    ]  # fmt: skip
    traces.append(
        {
            "type": "scatter", "mode": "lines", "name": "total", "x": events, "y": [t / scale for t in totals],
            "line": {"color": "#222222", "width": 1, "shape": "hv"}, "hovertemplate": f"%{{y:.6g}} {unit}",
        }
    )  # fmt: skip
    drawn_bands = bands(trace)
    traces += _drawn(drawn_bands)
    layout: dict[str, Any] = {
        "height": 520, "barmode": "overlay", "uniformtext": {"minsize": 10, "mode": "hide"},
        "xaxis": {"title": {"text": "allocation event"}},
        "yaxis": {"title": {"text": unit}, "domain": [0.32, 1] if drawn_bands else [0, 1], "rangemode": "tozero"},
    }  # fmt: skip
    if drawn_bands:
        layout["xaxis"]["anchor"] = "y2"
        lanes = max(band.lane for band in drawn_bands) + 1
        layout["yaxis2"] = {
            "title": {"text": "modules"}, "domain": [0, 0.28], "range": [lanes - 0.4, -0.6], "showticklabels": False,
            "fixedrange": True,
        }  # fmt: skip
    return Figure(traces, layout)


def bands(trace: Mapping[str, Any]) -> list[Band]:
    """The longest bands of modules, each in the lane of its depth."""
    parsed = []
    for band in map(mapping, sequence(trace.get("bands"))):
        begin, end = number(band.get("begin")), number(band.get("end"))
        if begin is not None and end is not None and end >= begin:
            parsed.append((begin, end, str(band.get("module", "")), phase_name(str(band.get("phase", "")))))
    longest = sorted(parsed, key=lambda b: b[0] - b[1])[:BANDS]
    placed, open_until = [], list[float]()
    for begin, end, module, phase in sorted(longest, key=lambda b: (b[0], -b[1])):
        # `open_until` holds the ends of the bands around this one, so its length is the lane.
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        if len(open_until) < LANES:
            placed.append(Band(module, phase, begin, end, len(open_until)))
        open_until.append(end)
    return placed


def _drawn(all_bands: Sequence[Band]) -> list[dict[str, Any]]:
    """One trace of bars per phase: the legend can hide each phase."""
    drawn = []
    for phase in dict.fromkeys(band.phase for band in all_bands):
        phase_bands = [band for band in all_bands if band.phase == phase]
        # The update belongs to no module, whichever ran last.
        names = [label(phase if phase == "update" else band.module or "(whole model)") for band in phase_bands]
        drawn.append(
            {
                "type": "bar", "orientation": "h", "yaxis": "y2", "name": label(phase or "modules"),
                "base": [band.begin for band in phase_bands], "x": [band.end - band.begin for band in phase_bands],
                "y": [band.lane for band in phase_bands], "text": names,
                "textposition": "inside", "insidetextanchor": "start",
                "constraintext": "inside", "width": 0.9,
                "marker": {"color": PHASE_COLOURS.get(phase, "#cccccc"), "line": {"color": "#ffffff", "width": 1}},  # type: ignore[call-overload]
                "hovertemplate": "%{text}<br>events %{base} to %{x}",
            }
        )  # fmt: skip
    return drawn
