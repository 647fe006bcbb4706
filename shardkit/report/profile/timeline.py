"""The memory timeline as one self-contained HTML file: an SVG of bytes by category over time, and tables.

torch's own export (`export_memory_timeline`) is deprecated, draws for CUDA only and needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ...errors import gib
from ..html.page import Cell, Page, n_bytes, paragraph, table, words
from .account import CATEGORIES, Account

_WIDTH, _HEIGHT, _MARGIN, _TOP = 1000, 360, 80, 24
_COLUMNS = 1000
"""Most moments to draw; moments that share a column show the one with the most bytes."""
# Okabe and Ito's palette, distinguishable with any colour vision.
_COLORS = dict(
    zip(
        CATEGORIES,
        ("#0072b2", "#cc79a7", "#56b4e9", "#d55e00", "#009e73", "#f0e442", "#e69f00", "#999999"),
        strict=True,
    )
)
_SHADES = {"forward": "#cfe3f5", "backward": "#f7d9c8", "optimizer": "#cdeadd"}


def render(account: Account, summary: Mapping[str, Any]) -> str:
    """The page for one rank; every name from the trace is escaped."""
    peak, steps = summary["peak"], summary["steps"]
    title = f"Memory of rank {summary['rank']}, step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
    settings = ", ".join(f"{key}={value}" for key, value in summary["settings"].items())
    lead = (
        f"Peak {gib(peak['bytes'])} on {summary['device']} at {peak['time_ms']:.2f} ms, in {peak['phase']} of step "
        f"{peak['step']}. {settings}"
    )
    shares = [
        (Cell(category, numeric=False, colour=_COLORS[category]), n_bytes(n), _share(n, peak["bytes"]))
        for category, n in peak["categories"].items()
        if n
    ]
    live = _rows(peak["live"], "op", "phase", "category")
    made = _rows(summary["allocations"], "op", "phase")
    page = Page(title, paragraph(lead))
    page.section("timeline", "Bytes by category over time", _svg(account))
    page.section("peak", "At the peak", table(["category", ">bytes", ">share"], shares))
    page.section("alive", "Alive at the peak", table(["made by", "in", "category", ">count", ">bytes"], live))
    page.section("allocated", "Allocated per step", table(["by", "in", ">count", ">bytes"], made))
    return page.render()


def _rows(entries: Sequence[Mapping[str, Any]], *names: str) -> list[list[Cell]]:
    """The first entries as rows: names, count, bytes."""
    return [[*(words(e[n]) for n in names), Cell(f"{e['count']:g}"), n_bytes(e["bytes"])] for e in entries[:15]]


def _share(part: int, total: int) -> Cell:
    return Cell(f"{100 * part / total:.1f} %", part / total) if total else Cell("–")


def _svg(account: Account) -> Markup:
    start = account.times[0]
    end = max([account.times[-1], *(end for _, end, _ in account.trace.ranges)])
    top = max(1, sum(account.levels[account.peak]))
    across, up = (_WIDTH - _MARGIN) / max(end - start, 1e-9), (_HEIGHT - 2 * _TOP) / top

    def x(time: float) -> float:
        return _MARGIN + (time - start) * across

    def y(n_bytes: float) -> float:
        return _HEIGHT - _TOP - n_bytes * up

    parts = [f'<rect x="{x(s):.1f}" y="{_TOP}" width="{(e - s) * across:.1f}" height="{_HEIGHT - 2 * _TOP}" '
             f'fill="{_SHADES[p]}" opacity=".45"><title>{p}: {(e - s) / 1e3:.2f} ms</title></rect>'
             for s, e, p in account.trace.ranges]  # fmt: skip
    moments = [*_thinned(account), (end, account.levels[-1])]
    below = [0] * len(moments)
    for index, category in enumerate(CATEGORIES):
        above = [b + level[index] for b, (_, level) in zip(below, moments, strict=True)]
        if above != below:
            parts.append(
                _area([x(time) for time, _ in moments], [y(b) for b in below], [y(a) for a in above], category)
            )
        below = above
    at = account.times[account.peak]
    parts.append(f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{_HEIGHT - _TOP}" stroke="currentColor" '
                 f'stroke-dasharray="4 3"><title>peak: {gib(top)}</title></line>')  # fmt: skip
    for share in (0, 0.5, 1):
        parts.append(
            f'<text x="{_MARGIN - 6}" y="{y(top * share) + 4:.1f}" text-anchor="end">{gib(top * share)}</text>'
        )
        time = start + share * (end - start)
        anchor = ("start", "middle", "end")[round(2 * share)]
        parts.append(
            f'<text x="{x(time):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{(time - start) / 1e3:.1f} ms</text>'
        )
    label = f"Bytes by category over time, {gib(top)} at most; shaded: forward, backward, optimizer"
    # No escaping needed: it holds no names from the trace, only categories, phases and numbers.
    drawing = "\n".join(parts)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n{drawing}\n</svg>'
    )


def _area(across: Sequence[float], low: Sequence[float], high: Sequence[float], category: str) -> str:
    """A filled band; levels hold until the next moment, so its edges are stairs."""
    points = [*_stairs(across, high), *reversed(list(_stairs(across, low)))]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    return f'<polygon points="{path}" fill="{_COLORS[category]}"><title>{category}</title></polygon>'


def _stairs(across: Sequence[float], heights: Sequence[float]) -> Iterator[tuple[float, float]]:
    for index, height in enumerate(heights):
        if index:
            yield across[index], heights[index - 1]
        yield across[index], height


def _thinned(account: Account) -> list[tuple[float, tuple[int, ...]]]:
    """The highest moment of each column, at its own time."""
    start, span = account.times[0], max(account.times[-1] - account.times[0], 1e-9)
    highest: dict[int, int] = {}
    for index, time in enumerate(account.times):
        column = int((time - start) / span * _COLUMNS)
        if column not in highest or sum(account.levels[index]) > sum(account.levels[highest[column]]):
            highest[column] = index
    return [(account.times[index], account.levels[index]) for index in highest.values()]
