"""A self-contained HTML file: escaped text around Plotly figures, one style, two scripts, and nothing else may run."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError, gib

Unit = Literal["bytes", "s", "count", "plain", "rate", "share"]
STYLE = """
:root { color-scheme: light; --ink: #1c2733; --faint: #66727f; --line: #dde3ea; --accent: #4c78a8; --bad: #b3261e; }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink); background: #f5f7f9; }
body { margin: 0; }
header, main { max-width: 1180px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 28px; } h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 8px; } h3 { font-size: 15px; margin: 18px 0 6px; }
p { margin: 6px 0; } .faint { color: var(--faint); } .bad { color: var(--bad); font-weight: 600; }
.badge { font-size: 14px; color: #fff; background: #3d8b5f; border-radius: 4px; padding: 2px 10px; }
.badge.bad { background: var(--bad); font-weight: 400; }
nav { margin: 10px 0 0; } nav a { margin-right: 14px; color: var(--accent); text-decoration: none; }
section { background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: 16px 20px; margin: 16px 0; }
table { border-collapse: collapse; font-size: 14px; } .wide { overflow-x: auto; }
th { text-align: left; color: var(--faint); font-weight: 500; } th, td { padding: 3px 18px 3px 0; vertical-align: top; }
tbody tr { border-top: 1px solid var(--line); } td.n, th.n { text-align: right; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.t { overflow-wrap: anywhere; min-width: 90px; } tr.worst td { font-weight: 600; }
pre { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow-x: auto; margin: 8px 0 0; }
.columns { display: flex; flex-wrap: wrap; gap: 8px 56px; } summary { cursor: pointer; color: var(--accent); }
"""
SETTINGS: dict[str, Any] = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
DRAW = """
for (const [id, data, layout] of REPORT.figures) Plotly.newPlot(id, data, layout, REPORT.settings);
"""


LINES = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b")


@dataclass(frozen=True)
class Figure:
    """Plotly's traces and layout; `empty` says what is missing where there is nothing to draw."""

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
    """A table's cell: what it shows, and the exact number behind it (bytes, seconds) where it shows one."""

    text: str
    value: float | None = None
    numeric: bool = True


def n_bytes(value: float | None) -> Cell:
    return Cell("–") if value is None else Cell(gib(value), value)


def quantity(value: float | None, unit: Unit) -> Cell:
    """A number in its unit; `value` in bytes, seconds or as it is."""
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


def esc(text: object) -> str:
    return html.escape(str(text))


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], mark: int | None = None) -> str:
    """Rows under a head; `mark` is the row that is set in bold. A head starting with `>` is right-aligned."""
    heads = "".join(f"<th{' class=n' if title.startswith('>') else ''}>{esc(title.lstrip('>'))}</th>" for title in head)
    lines = (
        f"<tr{' class=worst' if number == mark else ''}>{''.join(map(_td, row))}</tr>"
        for number, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _td(cell: Cell) -> str:
    exact = "" if cell.value is None or not math.isfinite(cell.value) else f' data-value="{cell.value!r}"'
    return f'<td class="{"n" if cell.numeric else "t"}"{exact}>{esc(cell.text)}</td>'


@dataclass
class Page:
    """Collects sections and figures, then becomes one file."""

    title: str
    subtitle: str = ""
    _sections: list[tuple[str, str, str]] = field(default_factory=list)
    _figures: list[list[Any]] = field(default_factory=list)

    def figure(self, name: str, drawn: Figure) -> str:
        """The place of a figure; `name` is unique on the page and becomes its id."""
        if not drawn.data:
            return f'<p class="faint">Nothing to draw: {esc(drawn.empty)}.</p>'
        layout = {**LAYOUT, **drawn.layout}
        self._figures.append([f"figure-{name}", drawn.data, layout])
        return f'<div id="figure-{name}" style="height:{int(layout["height"])}px"></div>'

    def section(self, name: str, heading: str, *content: str) -> None:
        self._sections.append((name, heading, "\n".join(content)))

    def render(self) -> str:
        """The HTML file.

        Raises:
            ConfigError: Plotly is not installed.
        """
        try:
            from plotly.io.json import to_json_plotly
            from plotly.offline import get_plotlyjs
        except ImportError as error:
            raise ConfigError(
                f"a page is drawn with Plotly, which does not import: {error}", "pip install 'shardkit[report]'"
            ) from error
        found = to_json_plotly({"figures": self._figures, "settings": SETTINGS}).replace("<", "\\u003c")
        scripts = [get_plotlyjs(), f"const REPORT = {found};{DRAW}"]
        allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
        policy = (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
        )
        links = " ".join(f'<a href="#{name}">{esc(heading)}</a>' for name, heading, _ in self._sections)
        body = "\n".join(
            f'<section id="{name}"><h2>{esc(heading)}</h2>\n{content}\n</section>'
            for name, heading, content in self._sections
        )
        code = "\n".join(f"<script>{script}</script>" for script in scripts)
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<link rel="icon" href="data:,">\n<title>{esc(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n'
            f"<body>\n<header><h1>{esc(self.title)}</h1>\n{self.subtitle}\n<nav>{links}</nav></header>\n"
            f"<main>\n{body}\n</main>\n{code}\n</body>\n</html>\n"
        )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


LAYOUT: dict[str, Any] = {
    "height": 320,
    "margin": {"l": 70, "r": 20, "t": 12, "b": 46},
    "hovermode": "closest",
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    "font": {"family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 12, "color": "#1c2733"},
    "paper_bgcolor": "#ffffff",
    "plot_bgcolor": "#ffffff",
    "template": {
        "layout": {
            "xaxis": {"gridcolor": "#e8ecf0", "zerolinecolor": "#e8ecf0", "automargin": True},
            "yaxis": {"gridcolor": "#e8ecf0", "zerolinecolor": "#c8d0d8", "automargin": True},
        }
    },
}
