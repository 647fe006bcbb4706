"""Memory against speed of the settings that an automatic plan compared, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..memory.units import gib
from ..plan.search.search import Found
from ..plan.show_auto import FRONT_HEAD, front_rows, named, reasons
from .html import LINES, Cell, Figure, label, unit_of, words
from .plot import write_page


def front_plot(found: Found) -> Figure:
    """A point per combination that fits, by engine; the front as a line."""
    unit, scale = unit_of([setting.needed for setting in found.fitting])
    engines = list(dict.fromkeys(setting.combination.engine for setting in found.fitting))
    front = sorted(found.front, key=lambda setting: setting.needed)
    data: list[dict[str, Any]] = [{
        "type": "scatter", "mode": "lines", "name": "front", "hoverinfo": "skip",
        "x": [setting.needed / scale for setting in front], "y": [setting.tokens_per_s for setting in front],
        "line": {"color": "#b8c0c8", "width": 2, "shape": "hv"},
    }]  # fmt: skip
    for place, engine in enumerate(engines):
        own = [setting for setting in found.fitting if setting.combination.engine == engine]
        data.append({
            "type": "scatter", "mode": "markers", "name": label(engine),
            "x": [setting.needed / scale for setting in own], "y": [setting.tokens_per_s for setting in own],
            "text": [label(named(setting, found.samples)) for setting in own],
            "marker": {"size": [15 if setting is found.best else 9 for setting in own],
                       "color": LINES[place % len(LINES)]},
            "hovertemplate": f"%{{text}}<br>%{{x:.2f}} {unit}<br>%{{y:,.0f}} tokens/s<extra></extra>",
        })  # fmt: skip
    layout = {
        "height": 460, "showlegend": True, "hovermode": "closest", "margin": {"l": 80, "r": 20, "t": 12, "b": 60},
        "xaxis": {"title": {"text": f"memory of a rank, {unit} (predicted)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "tokens/s of all ranks (predicted)"}, "rangemode": "tozero", "tickformat": ","},
    }  # fmt: skip
    return Figure(data, layout, "nothing fits")


def save_front(found: Found, folder: Path) -> Path:
    """Write `auto.html`; its path.

    Raises:
        ConfigError: Plotly is not installed.
    """
    head = [*FRONT_HEAD[:3], *(f">{title}" for title in FRONT_HEAD[3:])]
    rows = [[*map(words, row[:3]), *map(Cell, row[3:])] for row in front_rows(found)]
    best = f"The best: {named(found.best, found.samples)}, {gib(found.best.needed)}."
    return write_page(folder / "auto.html", "Automatic plan", front_plot(found), head, rows, best, *reasons(found))
