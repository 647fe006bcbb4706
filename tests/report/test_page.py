"""The file: whole, escaped, and with nothing from outside; in a browser it draws and asks for nothing."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigError
from shardkit.report.html import Figure, Page
from shardkit.report.page import compare_page, coordinates, facts, run_page, show_post_mortem
from shardkit.report.read import read_run
from tests.cli.test_main import shardkit
from tests.memory.samples import MIB
from tests.report.samples import EVIL, add, plan, post_mortem, trace, write_run

REPO = Path(__file__).resolve().parent.parent.parent


class Reader(HTMLParser):
    """The scripts of a page, and the attributes of its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts = re.findall(r"<script[^>]*>(.*?)</script", text, re.DOTALL)
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += attributes

    def of(self, *names: str) -> list[str | None]:
        return [value for name, value in self.attributes if name in names]

    def links(self) -> list[str]:
        """Those that lead out of the page."""
        return [link for link in self.of("href") if not str(link).startswith(("#", "data:"))]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run in which every name that a user chooses is a script."""
    path = write_run(tmp_path / "run <b>", gpu=True, host=EVIL, args=EVIL, strategy=EVIL)
    add(
        path,
        {
            "trace/rank0.json": trace(0, EVIL),
            "plan.json": plan() | {"verdict": EVIL},
            "oom/rank1.json": post_mortem(EVIL),
        },
    )
    (path / "profile").mkdir()
    (path / "profile" / "rank0_a&b<i>_memory.html").write_text("")
    environment = {"packages": {EVIL: EVIL}, "command": [EVIL], "gpus": [EVIL], "time": EVIL}
    (path / "env.json").write_text(json.dumps(environment))
    return path


def test_every_name_is_escaped(hostile: Path, tmp_path: Path) -> None:
    run, other = read_run(hostile), read_run(write_run(tmp_path / "plain"))
    for text in (run_page(run, hostile / "report.html"), compare_page(run, other)):
        page = Reader(text)
        assert len(page.scripts) == 2
        assert "alert(1)" not in page.scripts[0]
        assert "<" not in page.scripts[1].partition("const REPORT = ")[2].partition("\n")[0]
        assert page.of("src", "srcset", "data", "action") == []
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert html.escape(EVIL) in text
        assert "<script>alert" not in text
        assert "<b>" not in text


def test_a_page_has_every_part_of_a_run(hostile: Path) -> None:
    page = Reader(run_page(read_run(hostile), hostile / "report.html"))
    sections = ["summary", "training", "memory", "categories", "phases", "ranks", "traced", "plan", "oom", "profile"]
    drawn = [
        "training", "memory", "state", "categories", "traced-categories", "traced-phases", "phases", "ranks",
        "timeline", "plan",
    ]  # fmt: skip
    assert set(page.of("id")) >= {*sections, *(f"figure-{name}" for name in drawn)}
    assert page.links() == ["profile/rank0_a%26b%3Ci%3E_memory.html"]
    exact = {str(6 * 2**30 + 20 * MIB), str(3 * 2**30), str(200 * MIB)}
    assert exact <= set(page.of("data-value"))  # largest peak, OOM's request, trace


@pytest.mark.parametrize(
    ("parallel", "drawn"),
    [
        ({"strategy": "fsdp", "cp": 2}, ["samples 0|shard 0|cp 0", "samples 0|shard 1|cp 1", "samples 1|shard 2|cp 0"]),
        ({"strategy": "ddp", "cp": 4}, ["replica 0|cp 0", "replica 1|cp 1", "replica 2|cp 2"]),
        ({"strategy": "hsdp", "cp": 2}, ["samples 0|replica 0|shard 0|cp 0", "samples 0|replica 0|shard 1|cp 1",
          "samples 1|replica 1|shard 0|cp 0"]),
        ({"strategy": "fsdp", "cp": 2, "tp": 2}, ["shard 0|cp 0|tp 0", "shard 0|cp 0|tp 1", "shard 1|cp 1|tp 0"]),
        ({"strategy": "fsdp", "ep": 2}, ["samples 0|shard 0|ep 0", "samples 1|shard 1|ep 1", "samples 2|shard 2|ep 0"]),
        ({"strategy": "fsdp", "cp": 2, "ep": 4}, ["samples 0|shard 0|cp 0|ep 0", "samples 0|shard 1|cp 1|ep 1",
          "samples 1|shard 2|cp 0|ep 2"]),
        ({"strategy": "fsdp", "tp": 2, "ep": 4}, ["samples 0|shard 0|ep 0|tp 0", "samples 0|shard 0|ep 1|tp 1",
          "samples 1|shard 1|ep 2|tp 0"]),
        ({"strategy": "hsdp", "dp_shard": 2, "ep": 4}, []),
        ({"strategy": "fsdp", "cp": 3}, []),
        ({"strategy": EVIL, "cp": EVIL}, ["samples 0|replica 0", "samples 1|replica 1", "samples 2|replica 2"]),
    ],
)  # fmt: skip
def test_what_each_rank_holds_is_drawn(parallel: dict[str, Any], drawn: list[str], tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", gpu=True)
    (path / "config.yaml").write_text(json.dumps({"parallel": parallel}))
    found = coordinates(read_run(path))
    assert ["|".join(f"{name} {number}" for name, number in numbers.items()) for numbers in found[:3]] == drawn
    text = run_page(read_run(path), tmp_path / "report.html")
    mesh = text.partition('class="chart mesh"')[2].partition("</svg>")[0]
    assert [name in mesh for name in ("node0", "node1", "rank 3")] == [bool(drawn)] * 3
    assert all(line in mesh for numbers in drawn for line in numbers.split("|"))


def test_the_balance_of_experts_is_drawn(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    assert 'id="experts"' not in run_page(read_run(path), path / "report.html")
    loads = {"layers.0.mlp.experts": [2.5, 0.0, 0.05, 1.45], EVIL: [1.0, 1.0, 1.0, 1.0]}
    (path / "experts.json").write_text(json.dumps({"step": 20, "loads": loads}))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "config.yaml").write_text(json.dumps({"parallel": {"ep_imbalance": 1.72}}))
    balance = {"busiest_expert": 2.5, "starved_experts": 2, "ep_busiest_rank": 1.2, "ep_peak": 1.7}
    (path / "metrics.jsonl").write_text("".join(json.dumps({**line, **balance}) + "\n" for line in lines))
    text = run_page(read_run(path), path / "report.html")
    page = Reader(text)
    assert {"experts", "figure-experts", "figure-balance"} <= set(page.of("id"))
    assert {"2.5", "1.0"} <= set(page.of("data-value")) and ">1, 2<" in text.replace(" <", "<")
    assert "<script>alert" not in text
    drawn = page.scripts[1]
    assert all(name in drawn for name in ("busiest expert", "busiest rank", "starving experts", "planned: ", "heatmap"))
    (path / "experts.json").write_text('{"step": "?", "loads": {"a": "none", "b": [null, 1]}}')
    run_page(read_run(path), path / "report.html")


def test_links_are_relative_to_the_file(hostile: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "deep"
    out.mkdir(parents=True)
    page = Reader(run_page(read_run(hostile), out / "report.html"))
    assert page.links() == ["../../run%20%3Cb%3E/profile/rank0_a%26b%3Ci%3E_memory.html"]


def test_a_run_of_one_line_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    text = run_page(read_run(tmp_path), tmp_path / "report.html")
    assert "not finished: step 0" in text
    assert "Nothing to draw: no step was recorded." in text
    assert "metrics.jsonl: No such file" in text


def test_two_runs_are_compared(tmp_path: Path) -> None:
    a = read_run(write_run(tmp_path / "a", gpu=True, strategy="ddp"))
    b = read_run(write_run(tmp_path / "b", steps=10, lr=0.01))
    text = compare_page(a, b)
    assert set(Reader(text).of("id")) >= {"figure-training", "figure-memory", "figure-categories", "figure-phases"}
    assert re.search(r"parallel\.strategy</td><td[^>]*>ddp</td><td[^>]*>fsdp<", text)
    assert re.search(r"optim\.lr</td><td[^>]*>0\.001</td><td[^>]*>0\.01<", text)
    assert "run.dir</td>" not in text  # differs between any two
    assert "precision.mode</td>" not in text  # does not differ
    steps = re.search(r"optimizer steps</td>(.*?)</tr>", text)
    assert re.findall(r'data-value="([^"]+)"', steps[1]) == ["20.0", "10.0", "0.5"]


def test_the_command_writes_a_file_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert shardkit("report", a) == 0
    assert capsys.readouterr().out == f"finished 20 of 20 steps; report: {a / 'report.html'}\n"
    assert shardkit("report", a, b) == 0
    assert shardkit("report", a, "--out", tmp_path / "x.html") == 0
    texts = [path.read_text() for path in (a / "report.html", a / "compare.html", tmp_path / "x.html")]
    assert ["Key figures" in text for text in texts] == [False, True, False]
    assert shardkit("report", a, "--out", tmp_path / "absent" / "x.html") == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.io.json", None)
    page = Page("<x>")
    page.section("a", "<a>", "<b>")
    text = page.render()
    assert "<h1>&lt;x&gt;</h1>" in text and "&lt;b&gt;" in text and "<script" not in text, "a page without figures"
    page.figure("f", Figure([{"type": "bar"}]))
    with pytest.raises(ConfigError, match="drawn with Plotly") as error:
        page.render()
    assert error.value.fix == "pip install 'shardkit[report]'"


def test_a_report_is_written_without_torch(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    code = (
        "from shardkit.cli.__main__ import main\n"
        f"try:\n    main(['report', {str(path)!r}])\nexcept SystemExit as ended:\n"
        "    assert not ended.code\nimport sys; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env={**os.environ}, capture_output=True, text=True)
    report = f"finished 20 of 20 steps; report: {path / 'report.html'}"
    assert done.stdout.splitlines() == [report, "[]"], done.stderr


@pytest.mark.parametrize(
    ("task", "model", "shown"),
    [
        ("hf_causal_lm", {"init_from": "/models/llama", "hf": {}}, "/models/llama"),
        ("hf_causal_lm", {"hf": {"model_type": "llama", "hidden_size": 64}}, "model_type llama, hidden_size 64"),
        ("causal_lm", {}, "d_model 128, n_layers 4"),
    ],
)
def test_the_summary_names_the_model_that_the_task_trains(
    task: str, model: dict[str, object], shown: str, tmp_path: Path
) -> None:
    """Not the sizes of the reference transformer, which every config has."""
    run = read_run(write_run(tmp_path / "run"))
    sizes = {"d_model": 128, "n_layers": 4, "preset": None, "init_from": None, "hf_config": None}
    found = dict(facts(replace(run, config={"task": {"name": task}, "model": {**sizes, **model}})))
    assert found["model"] == shown


def test_a_post_mortem_has_its_cause_request_tensors_and_advice() -> None:
    text = show_post_mortem(1, post_mortem(EVIL))
    for shown in ("<h3>Rank 1</h3>", "memory: limit", "80.00 GiB", "train.py:3", "activation.policy=full", "2.00 GiB",
                  "2023-11-14T22:13:20+00:00", "&lt;script&gt;"):  # fmt: skip
        assert shown in text
    assert f'data-value="{3 * 2**30}"' in text
    assert "<script>" not in text


def test_counts_are_no_sizes() -> None:
    text = show_post_mortem(0, {"alloc_retries": 4096, "peak_rss": 4096, "exact": True})
    assert all(f">{shown}</td>" in text for shown in ("4096", "4.0 KiB", "True"))


PATIENT_MS = 200_000
"""The browser's several processes share the cores with all else that runs."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")


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
@needs_chromium
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
@needs_chromium
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
