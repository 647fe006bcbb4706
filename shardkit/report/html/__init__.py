"""A self-contained HTML file: escaped text around figures, one style, and no script except Plotly and its figures.

The templates and the style sheet are separate files beside this one, so editors know their languages.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from ...errors import gib, importing

if TYPE_CHECKING:
    from jinja2 import Template

Unit = Literal["bytes", "s", "count", "plain", "rate", "share"]
SETTINGS: dict[str, Any] = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
DRAW = """
async function draw(id, data, layout) { // legends and labels take more room in a narrow window: the plot keeps its own
  const drawn = await Plotly.newPlot(id, data, layout, REPORT.settings);
  const wanted = 0.85 * (layout.height - layout.margin.t - layout.margin.b);
  for (let height = layout.height, left = 4; left && drawn._fullLayout._size.h < wanted; left--) {
    height += wanted - drawn._fullLayout._size.h;
    drawn.style.height = height + "px";
    await Plotly.relayout(drawn, {height});
  }
}
for (const figure of REPORT.figures) draw(...figure);
"""
LINES = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b")


@dataclass(frozen=True)
class Figure:
    """Plotly's traces and layout; `empty` says what is missing if there is nothing to draw."""

    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    empty: str = ""


def label(text: object) -> str:
    """A run's text as Plotly shows it: it reads a few HTML tags and entities in labels."""
    return html.escape(str(text), quote=False)


def unit_of(values: Iterable[float | None]) -> tuple[str, float]:
    """(unit, bytes in it) in which the largest value reads well; powers of two, so that nothing is rounded."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return ("GiB", 2.0**30) if largest >= 2**30 else ("MiB", 2.0**20)


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, the exact number behind it (bytes, seconds) if any, its colour in a chart."""

    text: str
    value: float | None = None
    numeric: bool = True
    colour: str = ""

    @property
    def exact(self) -> str:
        """The number as a program would read it; empty without one."""
        return "" if self.value is None or not math.isfinite(self.value) else repr(self.value)


def n_bytes(value: float | None) -> Cell:
    return Cell("–") if value is None else Cell(gib(value), value)


def quantity(value: float | None, unit: Unit) -> Cell:
    """A number in its unit; `value` in bytes, in seconds, or without a unit."""
    if value is None:
        return Cell("–")
    if unit == "bytes":
        return n_bytes(value)
    texts = {
        "s": f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms",
        "count": f"{value:,.0f}",
        "plain": f"{value:.4f}",
        "rate": f"{value:,.0f}",
        "share": f"{100 * value:.2f} %",
    }
    return Cell(texts[unit], value)


def percent(share: float | None) -> Cell:
    return Cell("–") if share is None else Cell(f"{100 * share:+.1f} %".replace("-0.0 %", "+0.0 %"), share)


def words(value: object) -> Cell:
    return Cell(str(value), numeric=False)


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], mark: int | None = None) -> Markup:
    """Rows under a head; `mark` is the row that is set in bold. A head starting with `>` is right-aligned."""
    return Markup(_template("table.html").render(head=head, rows=rows, mark=mark))


def paragraph(text: object, kind: str = "") -> Markup:
    """Text that is escaped unless it is markup; `kind` is a class of the style sheet: `faint`, `bad`."""
    return Markup('<p class="{}">{}</p>').format(kind, text) if kind else Markup("<p>{}</p>").format(text)


def heading(text: object) -> Markup:
    return Markup("<h3>{}</h3>").format(text)


def folded(title: str, text: str) -> Markup:
    return Markup("<details><summary>{}</summary><pre>{}</pre></details>").format(title, text)


@dataclass
class Page:
    """Collects sections and figures, then becomes one file; `lead` goes below the title. Only `Markup` is trusted."""

    title: str
    lead: str = ""
    _sections: list[tuple[str, str, Markup]] = field(default_factory=list)
    _figures: list[list[Any]] = field(default_factory=list)

    def figure(self, name: str, drawn: Figure) -> Markup:
        """The placeholder of a figure; `name` is unique on the page and becomes its id."""
        if not drawn.data:
            return paragraph(f"Nothing to draw: {drawn.empty}.", "faint")
        layout = {**LAYOUT, **drawn.layout}
        self._figures.append([f"figure-{name}", drawn.data, layout])
        return Markup('<div id="figure-{}" style="height:{}px"></div>').format(name, int(layout["height"]))

    def section(self, name: str, heading: str, *content: str) -> None:
        self._sections.append((name, heading, Markup("\n").join(content)))

    def render(self) -> str:
        """The HTML file; it includes Plotly (5 MB) if there is a figure to draw."""
        scripts = _scripts(self._figures) if self._figures else []
        fields = {"title": self.title, "lead": self.lead, "sections": self._sections, "scripts": scripts}
        return _template("page.html").render(fields) + "\n"


def _scripts(figures: list[list[Any]]) -> list[str]:
    with importing("a page is drawn with Plotly", "pip install 'shardkit[report]'"):
        from plotly.io.json import to_json_plotly
        from plotly.offline import get_plotlyjs
    # "<" is escaped because a run's text such as "</script>" would end the script.
    drawn = to_json_plotly({"figures": figures, "settings": SETTINGS}).replace("<", "\\u003c")
    return [get_plotlyjs(), f"const REPORT = {drawn};{DRAW}"]


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, FileSystemLoader  # takes a tenth of a second: only for runs with a page

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["digest"] = lambda script: base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(name)


LAYOUT: dict[str, Any] = {
    "height": 320,
    "margin": {"l": 70, "r": 20, "t": 12, "b": 46},
    "hovermode": "closest",
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    "font": {"family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 12, "color": "#1c2733"},
    "paper_bgcolor": "#ffffff", "plot_bgcolor": "#ffffff",
    "template": {"layout": {
        "xaxis": {"gridcolor": "#e8ecf0", "zerolinecolor": "#e8ecf0", "automargin": True},
        "yaxis": {"gridcolor": "#e8ecf0", "zerolinecolor": "#c8d0d8", "automargin": True},
    }},
}  # fmt: skip
