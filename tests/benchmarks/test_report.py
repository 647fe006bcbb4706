"""docs/benchmarks.md says what the result files say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jinja2 import UndefinedError

from benchmarks import markdown
from benchmarks.markdown import section
from benchmarks.report import PAGE, page, rendered


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.report"


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
