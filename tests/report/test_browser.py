"""A report in a real browser: it draws, answers the pointer, asks for nothing, and shows what the files say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardkit.report.compare import compare_page
from shardkit.report.page import run_page
from shardkit.report.read import read_run
from tests.report.samples import EVIL, add, plan, post_mortem, trace, write_run

PATIENT_MS = 200_000
"""The browser's several processes share the cores with all else that runs."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")


@dataclass
class Opened:
    """A page of the browser, and what it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def show(self, path: Path) -> None:
        """Load a file and wait until every figure is drawn."""
        self.page.goto(path.as_uri())
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('[id^=figure-]')].every(d => d.querySelector('.main-svg'))"
        )

    def traces(self, figure: str) -> list[dict[str, Any]]:
        """What Plotly holds of a figure."""
        script = "id => document.getElementById(id).data.map(t => ({name: t.name, x: t.x, y: t.y, yaxis: t.yaxis}))"
        return self.page.evaluate(script, f"figure-{figure}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENT_MS)
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """A fresh page that may load files of this machine and nothing else."""
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    context.set_default_timeout(PATIENT_MS)
    found = Opened(context.new_page())

    def decide(route: Any) -> None:
        found.asked.append(route.request.url)
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            route.abort()

    context.route("**/*", decide)
    found.page.on("console", lambda message: found.said.append(message.text))
    found.page.on("pageerror", lambda error: found.said.append(str(error)))
    found.page.on("dialog", lambda dialog: found.said.append(dialog.message))
    yield found
    context.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A hostile run with every part, and its report."""
    path = write_run(tmp_path / "run", gpu=True, host=EVIL, args="</pre><img src=x onerror=alert(2)>")
    add(path, {"trace/rank0.json": trace(0, EVIL), "plan.json": plan(), "oom/rank1.json": post_mortem(EVIL)})
    (path / "report.html").write_text(run_page(read_run(path), path / "report.html"))
    return path


@pytest.mark.slow
def test_it_draws_every_figure_asks_for_nothing_and_says_nothing(opened: Opened, run: Path, tmp_path: Path) -> None:
    opened.show(run / "report.html")
    figures = opened.page.locator("[id^=figure-]")
    assert opened.page.locator("[id^=figure-]:has(.main-svg .trace path)").count() == figures.count() == 10
    assert opened.page.locator("script").count() == 2
    assert opened.page.locator("text=<script>alert(1)</script>").count() > 0  # shown, not run
    other = tmp_path / "compare.html"
    other.write_text(compare_page(read_run(run), read_run(write_run(tmp_path / "b"))))
    opened.show(other)
    assert opened.said == []
    assert opened.asked == [(run / "report.html").as_uri(), other.as_uri()]


@pytest.mark.slow
def test_a_narrow_window_keeps_the_plot_below_its_legend(opened: Opened, run: Path) -> None:
    opened.show(run / "report.html")
    sizes = """() => [...document.querySelectorAll('[id^=figure-]')].map(d => {
        const legend = d.querySelector('.legend')?.getBoundingClientRect(), plot = d._fullLayout._size;
        return [plot.h, legend ? legend.bottom - d.getBoundingClientRect().top - plot.t : 0];
    })"""
    wide = [height for height, _ in opened.page.evaluate(sizes)]
    opened.page.set_viewport_size({"width": 420, "height": 900})
    opened.show(run / "report.html")
    held = f"wide => ({sizes})().every(([height, over], i) => height >= 0.8 * wide[i] && over <= 2)"
    opened.page.wait_for_function(held, arg=wide)
    assert opened.said == []
