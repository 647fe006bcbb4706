"""docs/benchmarks.md says what the result files say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jinja2 import UndefinedError

from benchmarks import markdown
from benchmarks.common import RESULTS
from benchmarks.markdown import section
from benchmarks.report import PAGE, page, rendered


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.report"


def only_parts(name: str, *keys: str) -> dict[str, Any]:
    """The recorded result as it is after some of its parts, with nothing of an earlier one."""
    recorded = json.loads((RESULTS / f"{name}.json").read_text())
    return {key: recorded[key] for key in ("environment", "goals", *keys) if key in recorded}


def only_of_engines(name: str, *keys: str) -> dict[str, Any]:
    recorded = json.loads((RESULTS / f"{name}.json").read_text())
    engines = {
        engine: {key: figures[key] for key in keys if key in figures} for engine, figures in recorded["engines"].items()
    }
    return {**recorded, "engines": engines}


PARTS = {
    "peers, memory": ("peers", only_of_engines("peers", "peak_bytes", "refused"), "Medians:"),
    "sft, no data": ("sft", only_parts("sft", "settings", "packages"), "lora packed"),
    "sft, data alone": ("sft", {**json.loads((RESULTS / "sft.json").read_text()), "settings": {}}, "Tokenisation"),
    "plan, no case with a goal": ("plan", {**only_parts("plan"), "cases": {}}, "seconds"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_measured_first_is_shown(part: str) -> None:
    name, result, text = PARTS[part]
    assert text in rendered(name, result)


def test_a_template_without_a_value_is_refused() -> None:
    with pytest.raises(UndefinedError, match="cases"):
        rendered("plan", {"environment": {}})


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Renders a template that stands for page.md."""

    def render(template: str, **values: Any) -> str:
        monkeypatch.setattr(markdown, "parts", lambda: ("", {"staged": ("staged", template)}))
        markdown.templates.cache_clear()
        return section("staged", values)

    yield render
    markdown.templates.cache_clear()


def test_prose_is_filled_and_a_block_without_figures_is_left_out(staged: Callable[..., str]) -> None:
    table = "| a | b |\n|---|---|\n{% for row in lines %}\n| {{ row }} |  |\n{% endfor %}\n"
    text = staged("## A title\n\n" + "word " * 40 + "\n\n{{ nothing }}\n\n" + table, nothing="", lines=["c"])
    title, prose, shown = text.split("\n\n")
    assert title == "## A title" and prose.count("\n") == 1 and max(map(len, prose.splitlines())) <= 118
    assert shown == "| a | b |\n|---|---|\n| c |  |\n"


def test_a_figure_that_is_not_known_is_a_dash(staged: Callable[..., str]) -> None:
    template = "{{ size | gib }} {{ missing | percent(1) }} {{ share | change(1) }}"
    assert staged(template, size=None, share=-0.01) == "– – -1.0 %\n"
