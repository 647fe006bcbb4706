"""Pages for the planner's results: the ladder, and memory against speed in an automatic plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import gib
from ..files import write_whole
from ..plan.model.cost import SPEED_ERROR
from ..plan.search.ladder import HEAD, Step, cells
from ..plan.search.search import SearchResult, named
from ..plan.search.show import FRONT_HEAD, front_rows, reasons
from ..plan.search.trial import writing
from .figures import bar
from .html import LINES, Cell, Figure, Page, label, paragraph, table, unit_of, words

_BAD = "#b3261e"


def ladder_plot(steps: Sequence[Step], limit: int | None) -> Figure:
    """Predicted and measured peak of every rung as bars, its speed as a line, and the memory limit.

    `limit`: bytes that a rank may use; `None` = no limit was given.
    """
    names = [label(step.rung.name) for step in steps]
    predicted = [step.predicted for step in steps]
    measured = [step.trial.peak if step.trial else None for step in steps]
    unit, scale = unit_of([*predicted, *measured, limit])

    def bars(name: str, values: Sequence[int | None], colour: str) -> dict[str, Any]:
        heights = [None if value is None else value / scale for value in values]
        hover = f"%{{y:.3f}} {unit}<extra>{name}</extra>"
        return bar(name, names, heights, colour, unit, hovertemplate=hover)

    data = [bars("predicted", predicted, "#9ecae9")]
    if any(value is not None for value in measured):
        data.append(bars("measured", measured, LINES[0]))
    speeds = [step.trial.tokens_per_s if step.trial else None for step in steps]
    layout: dict[str, Any] = {
        "height": 420, "barmode": "group", "bargap": 0.35, "showlegend": True,
        "margin": {"l": 70, "r": 70, "t": 12, "b": 60},
        "xaxis": {"type": "category", "categoryarray": names},
        "yaxis": {"title": {"text": f"peak of a rank, {unit}"}, "rangemode": "tozero"},
    }  # fmt: skip
    if any(speed is not None for speed in speeds):
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": "tokens/s", "x": names, "y": speeds, "yaxis": "y2",
            "connectgaps": True, "line": {"color": LINES[1], "width": 2}, "marker": {"size": 9},
            "hovertemplate": "%{y:,.0f} tokens/s<extra></extra>",
        })  # fmt: skip
        layout["yaxis2"] = {
            "title": {"text": "tokens/s of all ranks"}, "overlaying": "y", "side": "right", "rangemode": "tozero",
            "showgrid": False, "tickmode": "auto", "tickformat": ",",
        }  # fmt: skip
    ended = {name: step.trial.outcome for name, step in zip(names, steps, strict=True) if step.trial}
    for outcome in sorted(set(ended.values()) - {"ok"}):
        at = [name for name in names if ended.get(name) == outcome]
        heights = [0.0 if limit is None else limit / scale] * len(at)
        data.append({
            "type": "scatter", "mode": "markers", "name": outcome, "x": at, "y": heights,
            "marker": {"symbol": "x", "size": 13, "color": _BAD}, "hovertemplate": f"{outcome}<extra></extra>",
        })  # fmt: skip
    if limit is not None:
        layout["shapes"] = [{
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit / scale, "y1": limit / scale,
            "line": {"color": _BAD, "dash": "dash", "width": 1.5},
        }]  # fmt: skip
        layout["annotations"] = [{
            "text": f"limit {limit / scale:.2f} {unit}", "xref": "paper", "x": 0.995, "y": limit / scale,
            "xanchor": "right", "yanchor": "bottom", "showarrow": False, "font": {"color": _BAD},
        }]  # fmt: skip
    return Figure(data, layout, "no rung")


def save_ladder(steps: Sequence[Step], limit: int | None, folder: Path) -> Path:
    """Write `ladder.html`; returns its path."""
    rows = [[words(name), *map(Cell, figures), words(outcome)] for name, *figures, outcome in map(cells, steps)]
    head = [HEAD[0], *(f">{title}" for title in HEAD[1:-1]), HEAD[-1]]
    return write_page(folder / "ladder.html", "Ladder", ladder_plot(steps, limit), head, rows)


def write_page(
    path: Path, title: str, figure: Figure, head: Sequence[str], rows: Sequence[Sequence[Cell]], *notes: str
) -> Path:
    """Write a plot, its table and notes as one file that needs no network; returns its path."""
    page = Page(title)
    page.section("plot", "Plot", page.figure("plot", figure))
    page.section("table", "Figures", table(head, rows))
    if notes:
        page.section("notes", "Notes", *map(paragraph, notes))
    text = page.render()
    with writing(path.parent):
        write_whole(path, text)
    return path


def front_plot(plan: SearchResult) -> Figure:
    """One point per combination that fits, coloured by engine; the front as a line."""
    unit, scale = unit_of([setting.needed for setting in plan.fitting])
    engines = list(dict.fromkeys(setting.combination.engine for setting in plan.fitting))
    front = sorted(plan.front, key=lambda setting: setting.needed)
    traces: list[dict[str, Any]] = [{
        "type": "scatter", "mode": "lines", "name": "front", "hoverinfo": "skip",
        "x": [setting.needed / scale for setting in front], "y": [setting.tokens_per_s for setting in front],
        "line": {"color": "#b8c0c8", "width": 2, "shape": "hv"},
    }]  # fmt: skip
    for number, engine in enumerate(engines):
        settings = [setting for setting in plan.fitting if setting.combination.engine == engine]
        traces.append({
            "type": "scatter", "mode": "markers", "name": label(engine),
            "x": [setting.needed / scale for setting in settings], "y": [setting.tokens_per_s for setting in settings],
            "text": [label(named(setting)) for setting in settings],
            "marker": {"size": [15 if setting is plan.best else 9 for setting in settings],
                       "color": LINES[number % len(LINES)]},
            "hovertemplate": f"%{{text}}<br>%{{x:.2f}} {unit}<br>%{{y:,.0f}} tokens/s<extra></extra>",
        })  # fmt: skip
    layout = {
        "height": 460, "showlegend": True, "hovermode": "closest", "margin": {"l": 80, "r": 20, "t": 12, "b": 60},
        "xaxis": {"title": {"text": f"memory of a rank, {unit} (predicted)"}, "rangemode": "tozero"},
        "yaxis": {
            "title": {"text": f"tokens/s of all ranks (predicted; {SPEED_ERROR} off on GPUs)"}, "rangemode": "tozero",
            "tickformat": ",",
        },
    }  # fmt: skip
    return Figure(traces, layout, "nothing fits")


def save_front(plan: SearchResult, folder: Path) -> Path:
    """Write `auto.html`; returns its path."""
    head = [*FRONT_HEAD[:3], *(f">{title}" for title in FRONT_HEAD[3:])]
    rows = [[*map(words, row[:3]), *map(Cell, row[3:])] for row in front_rows(plan)]
    best = f"The best: {named(plan.best)}, {gib(plan.best.needed)}."
    return write_page(folder / "auto.html", "Automatic plan", front_plot(plan), head, rows, best, *reasons(plan))
