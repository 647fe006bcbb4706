"""Plots as Plotly figures: plain data, drawn by the script that the page carries.

Names from a run only ever become names and labels, escaped, never templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..memory.rows import PHASES, RankRow
from . import measure, read
from .html import LINES, Figure, label, unit_of
from .measure import UNATTRIBUTED, Parts, RankStepTime
from .read import Run

COLOURS = {
    "params": "#4c78a8",
    "quantized": "#d67195",
    "master_params": "#9ecae9",
    "grads": "#f58518",
    "optimizer": "#54a24b",
    "buffers": "#b279a2",
    "activations": "#e45756",
    "communication": "#72b7b2",
    "workspace": "#eeca3b",
    "staging": "#88d27a",
    UNATTRIBUTED: "#bab0ac",
}
PHASE_COLOURS = dict(zip(PHASES, ("#d8d8d8", "#bdbdbd", "#9ecae9", "#fdbe85", "#a1d99b"), strict=True))
POINTS = 1000
"""A line keeps about this many points at most, including its extremes."""

RunsByLabel = Mapping[str, Run]
"""Runs by their label in a plot; a single run has the label ""."""


def thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most about `POINTS` points of a line: the smallest and largest of each stretch, and the last point."""
    if len(xs) <= POINTS:
        return list(xs), list(ys)
    # Each stretch keeps two points, so half as many stretches as points.
    width = -(-2 * len(xs) // POINTS)
    shown = set[int]()
    for start in range(0, len(xs), width):
        stretch = range(start, min(start + width, len(xs)))
        shown |= {min(stretch, key=lambda i: ys[i]), max(stretch, key=lambda i: ys[i])}
    order = sorted(shown | {len(xs) - 1})
    return [xs[i] for i in order], [ys[i] for i in order]


def line(
    name: str, xs: Sequence[float], ys: Sequence[float], colour: str, panel: int = 0, **trace_settings: Any
) -> dict[str, Any]:
    """A curve over steps in one of the stacked panels."""
    xs_shown, ys_shown = thin(xs, ys)
    mode = "lines+markers" if len(xs) < 50 else "lines"
    return {
        "type": "scatter", "mode": mode, "name": label(name), "x": xs_shown, "y": ys_shown, "line": {"color": colour},
        "yaxis": _axis(panel), "hovertemplate": "%{y:.6g}<br>step %{x}", **trace_settings,
    }  # fmt: skip


def bar(
    name: str, xs: Sequence[Any], ys: Sequence[float | None], colour: str, unit: str, **trace_settings: Any
) -> dict[str, Any]:
    return {
        "type": "bar", "name": label(name), "x": xs, "y": ys, "marker": {"color": colour},
        "hovertemplate": f"%{{y:.6g}} {unit}", **trace_settings,
    }  # fmt: skip


def panels(titles: Sequence[str], x_title: str, height: int = 220) -> dict[str, Any]:
    """Layout of stacked plots over one x axis, the first on top."""
    share, gap = 1 / len(titles), 0.04 if len(titles) > 1 else 0.0
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x_title}}, "height": 60 + height * len(titles)}
    for index, title in enumerate(titles):
        top = 1 - index * share
        domain = [max(0.0, top - share + gap), top]
        layout[f"yaxis{index + 1 if index else ''}"] = {
            "title": {"text": label(title)}, "domain": domain, "rangemode": "normal" if title == "loss" else "tozero",
        }  # fmt: skip
    layout["xaxis"]["anchor"] = _axis(len(titles) - 1)
    return layout


def _axis(panel: int) -> str:
    return f"y{panel + 1}" if panel else "y"


def smoothed(values: Sequence[float]) -> list[float]:
    """An exponential moving average over about a fiftieth of a line, without bias towards the first value."""
    keep = 1 - 1 / max(5, len(values) // 50)
    # Dividing by the sum of the weights removes the bias towards zero of the first averages (Adam does the same).
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight)
    return means


def training(runs: RunsByLabel) -> Figure:
    """Loss (smoothed for 50 steps or more), validation loss and throughput over steps: one colour per run."""
    traces = []
    for number, (name, run) in enumerate(runs.items()):
        colour = LINES[number]
        dotted: dict[str, Any] = {"mode": "lines+markers", "line": {"color": colour, "dash": "dot"}}
        solid: dict[str, Any] = {}
        keys = dict.fromkeys(key for record in run.metrics for key in record if key.startswith("val_loss_"))
        parts = [(key, f"validation loss, {key.removeprefix('val_loss_')}", dotted) for key in keys]
        for key, text, style in (("loss", "loss", solid), ("val_loss", "validation loss", dotted), *parts):
            steps, ys = measure.column(run, key)
            if ys:
                traces.append({**line(f"{name} {text}".strip(), steps, ys, colour), **style})
            if key == "loss" and len(ys) >= 50:
                traces[-1]["opacity"] = 0.35
                traces.append(line(f"{name} loss, smoothed".strip(), steps, smoothed(ys), colour))
        steps, ys = measure.column(run, "tokens_per_s")
        if ys:
            traces.append(line(f"{name} {run.targets}/s".strip(), steps, ys, colour, 1))
    units = "/s, ".join(dict.fromkeys(run.targets for run in runs.values()))
    axes = {
        "type": "buttons", "direction": "right", "x": 1, "xanchor": "right", "y": 1, "yanchor": "top",
        "pad": {"r": 4, "t": 4}, "font": {"size": 11},
        "buttons": [
            {"label": kind, "method": "relayout", "args": [{"yaxis.type": kind, "yaxis.autorange": True}]}
            for kind in ("linear", "log")
        ],
    }  # fmt: skip
    layout = {**panels(["loss", f"{units}/s"], "optimizer step"), "updatemenus": [axes]}
    return Figure(traces, layout, "no step was recorded")


def balance(run: Run) -> Figure:
    """How uneven routers are over steps: the busiest rank and expert over the average, and the starving experts."""
    lines = [
        ("busiest expert", "busiest_expert", 0),
        ("busiest rank", "ep_busiest_rank", 0),
        ("most in one layer of a micro-batch", "ep_peak", 0),
        ("starving experts", "starved_experts", 1),
    ]
    traces = [
        line(name, steps, ys, LINES[index], panel)
        for index, (name, key, panel) in enumerate(lines)
        for steps, ys in [measure.column(run, key)]
        if ys
    ]
    steps, peaks = measure.column(run, "ep_peak")
    if peaks and (planned := read.number(run.setting("parallel.ep_imbalance"))):
        line_of_plan = line("planned: parallel.ep_imbalance", steps, [planned] * len(steps), LINES[2])
        traces.append({**line_of_plan, "mode": "lines", "line": {"color": LINES[2], "dash": "dot"}})
    return Figure(traces, panels(["over the average", "experts"], "optimizer step"), "no step counted rows")


def experts(loads: Mapping[str, Sequence[float]]) -> Figure:
    """A map of layers by experts: the rows of each over its layer's average."""
    layers = [label(name) for name in loads]
    trace = {
        "type": "heatmap", "y": layers, "z": [*loads.values()], "zmin": 0, "zmax": 3, "colorscale": "Viridis",
        "hovertemplate": "expert %{x} of %{y}: %{z} × the average<extra></extra>",
    }  # fmt: skip
    axes = {"xaxis": {"title": {"text": "expert"}}, "yaxis": {"automargin": True, "autorange": "reversed"}}
    layout = {"height": 140 + 14 * len(layers), **axes}
    return Figure([trace] if layers else [], layout, "no layer counted rows")


def memory(run: Run) -> Figure:
    """Each rank's memory at every gather: its peak since the previous gather."""
    gpu = measure.on_gpu(run)
    kinds = (("allocated", "reserved") if gpu else ()) + ("rss",)
    lines = [measure.series(run, lambda row, kind=kind: measure.interval_peak(row, kind)) for kind in kinds]  # type: ignore[misc]
    unit, scale = unit_of(y for by_rank in lines for _, ys in by_rank.values() for y in ys)
    traces = [
        line(f"rank {name}", steps, [y / scale for y in ys], LINES[index % len(LINES)], panel,
             legendgroup=label(name), showlegend=panel == 0)
        for panel, by_rank in enumerate(lines)
        for index, (name, (steps, ys)) in enumerate(by_rank.items())
    ]  # fmt: skip
    titles = [f"peak {'RSS' if kind == 'rss' else kind}, {unit}" for kind in kinds]
    return Figure(traces, panels(titles, "optimizer step"), "no memory was gathered")


def worst_memory(runs: RunsByLabel) -> Figure:
    """The largest peak of any rank at every gather, one line per run."""
    by_run = {name: measure.worst_over_time(run) for name, run in runs.items()}
    unit, scale = unit_of(y for _, ys in by_run.values() for y in ys)
    traces = [
        line(name, steps, [y / scale for y in ys], LINES[index])
        for index, (name, (steps, ys)) in enumerate(by_run.items())
        if ys
    ]
    return Figure(traces, panels([f"largest peak of a rank, {unit}"], "optimizer step"), "no memory was gathered")


def categories(bars: Mapping[str, Mapping[str, Parts]]) -> Figure:
    """Stacked bars of bytes by category, for every name and place (device, host)."""
    columns = [(name, location, parts) for name, locations in bars.items() for location, parts in locations.items()]
    unit, scale = unit_of(sum(parts.values()) for _, _, parts in columns)
    present = dict.fromkeys(kind for _, _, parts in columns for kind, n_bytes in parts.items() if n_bytes)
    order = [kind for kind in COLOURS if kind in present] + [kind for kind in present if kind not in COLOURS]
    places = [[label(name) for name, _, _ in columns], [label(location) for _, location, _ in columns]]
    traces = [
        bar(kind.replace("_", " "), places, [parts.get(kind, 0) / scale for _, _, parts in columns],
            COLOURS.get(kind, LINES[number % len(LINES)]), unit)
        for number, kind in enumerate(order)
    ]  # fmt: skip
    return Figure(traces, {**panels([unit], ""), "barmode": "stack", "height": 380}, "no state was counted")


def phases(peaks: Mapping[str, Mapping[str, int]], metric: str) -> Figure:
    """Grouped bars: the peak in each phase, one colour per name."""
    unit, scale = unit_of(peak for peak_by_phase in peaks.values() for peak in peak_by_phase.values())
    traces = [
        bar(name, list(peak_by_phase), [peak / scale for peak in peak_by_phase.values()], LINES[index % len(LINES)],
            f"{unit} in %{{x}}")
        for index, (name, peak_by_phase) in enumerate(peaks.items())
        if peak_by_phase
    ]  # fmt: skip
    return Figure(traces, {**panels([f"{metric}, {unit}"], ""), "barmode": "group"}, "no phase was accounted")


def ranks(rows: Sequence[RankRow], times: Mapping[int, RankStepTime]) -> Figure:
    """Each rank's peak, and below it the parts of its mean step time."""
    names = [label(f"rank {row.name}") for row in rows]
    peaks = [row.host_mem.peak_rss if row.device_mem is None else row.device_mem.peak_allocated for row in rows]
    unit, scale = unit_of(peaks)
    metric = "peak allocated" if any(row.device_mem for row in rows) else "peak RSS"
    traces = [bar(metric, names, [peak / scale for peak in peaks], LINES[0], unit, yaxis="y")]
    spent = [times.get(row.identity.rank) for row in rows]
    for name, key, colour in (
        ("waiting for data", "data", LINES[3]),
        ("forward", "forward", LINES[2]),
        ("backward, update, waiting for ranks", "remainder", LINES[7]),
    ):
        ms = [None if t is None else 1e3 * getattr(t, key) for t in spent]
        traces.append(bar(name, names, ms, colour, "ms", yaxis="y2"))
    return Figure(traces, {**panels([f"{metric}, {unit}", "step time, ms"], "", 170), "barmode": "stack"}, "no ranks")
