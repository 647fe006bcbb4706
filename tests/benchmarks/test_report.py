"""docs/benchmarks.md says what the result files say."""

from __future__ import annotations

import pytest

from benchmarks.markdown import rows, section
from benchmarks.report import PAGE, page, rendered


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.report"


def test_a_template_without_a_value_is_refused() -> None:
    with pytest.raises(KeyError, match="rows"):
        rendered("plan", {"environment": {}}, {})


def test_prose_is_filled_and_a_block_without_figures_is_left_out() -> None:
    template = "## A title\n\n" + "word " * 40 + "\n\n{nothing}\n\n| a | b |\n|---|---|\n{rows}\n"
    text = section(template, {"nothing": "", "rows": rows([["c", ""]]), "measured": ""})
    title, prose, shown = text.split("\n\n")
    assert title == "## A title" and prose.count("\n") == 1 and max(map(len, prose.splitlines())) <= 118
    assert shown == "| a | b |\n|---|---|\n| c |  |\n"
