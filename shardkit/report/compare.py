"""Two runs on one page: their differences in settings and in results."""

from __future__ import annotations

from markupsafe import Markup

from ..memory.rows import pressure
from . import figures, measure
from .html import Cell, Page, heading, paragraph, quantity, table, words
from .page import facts
from .read import Run, mapping

NAMES = ("A", "B")
UNIMPORTANT = ("run.dir", "run.overwrite", "run.resume", "logging.prometheus_port")
"""Settings that differ between any two runs and do not affect results."""


def compare_page(a: Run, b: Run) -> str:
    """The HTML file that shows two runs side by side; ratios are B over A."""
    runs = dict(zip(NAMES, (a, b), strict=True))
    lead = Markup("").join(
        Markup('<p>{}: {} <span class="faint">({})</span></p>').format(name, run.path, measure.status(run)[1])
        for name, run in runs.items()
    )
    page = Page(f"{a.name} and {b.name}", lead)
    notes = [paragraph(f"{name}: {note}", "faint") for name, run in runs.items() for note in run.notes]
    page.section("summary", "Key figures", _key_figures(a, b), *notes)
    page.section("settings", "What differs", _settings(a, b))
    page.section("training", "Loss and throughput", page.figure("training", figures.training(runs)))
    page.section("memory", "Memory over time", page.figure("memory", figures.worst_memory(runs)))
    page.section("categories", "Where the memory is, on the worst rank", *_worst(page, runs))
    return page.render()


def _key_figures(a: Run, b: Run) -> Markup:
    before, after = ({figure.label: figure for figure in measure.key_figures(run)} for run in (a, b))
    lines = []
    for label in dict.fromkeys([*before, *after]):
        pair = [side.get(label) for side in (before, after)]
        if any(figure is not None and figure.value is not None for figure in pair):
            cells = [Cell("–") if figure is None else quantity(figure.value, figure.unit) for figure in pair]
            x, y = (None if figure is None else figure.value for figure in pair)
            lines.append([words(label), *cells, Cell("–") if not x or y is None else Cell(f"{y / x:.3f}", y / x)])
    return table(["", ">A", ">B", ">B / A"], lines)


def _settings(a: Run, b: Run) -> Markup:
    sides = []
    for run in (a, b):
        settings = {key: value for key, value in measure.flat(run.config).items() if key not in UNIMPORTANT}
        world = {name: fact for name, fact in facts(run) if name == "world"}
        versions = {**mapping(run.environment.get("packages")), "git commit": run.environment.get("git_commit")}
        sides.append([settings, world, {name: version for name, version in versions.items() if version}])
    lines = [
        [words(name), words(before.get(name, "–")), words(after.get(name, "–"))]
        for before, after in zip(*sides, strict=True)
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    return table(["", "A", "B"], lines) if lines else paragraph("Nothing: same settings, world and versions.")


def _worst(page: Page, runs: dict[str, Run]) -> list[Markup]:
    rows = {name: max(run.last_rows, key=pressure) for name, run in runs.items() if run.last_rows}
    names = {name: f"{name}: rank {row.name}" for name, row in rows.items()}
    bars = {names[name]: measure.parts(row) for name, row in rows.items() if row.state is not None}
    peaks = {names[name]: measure.phase_peaks(runs[name].gathers, row.identity.rank) for name, row in rows.items()}
    kinds = {"peak allocated" if row.device_mem else "peak RSS" for row in rows.values()}
    return [
        heading("State"),
        page.figure(
            "state", figures.categories({name: measure.state_alone(locations) for name, locations in bars.items()})
        ),
        heading("State and the rest of the peak"),
        page.figure("categories", figures.categories(bars)),
        heading("Peak by phase"),
        page.figure("phases", figures.phases(peaks, " and ".join(sorted(kinds)))),
    ]
