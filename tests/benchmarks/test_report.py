"""docs/benchmarks.md says what the result files say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.common import REPO
from benchmarks.report import PAGE, page

LINK = re.compile(r"\]\((?:docs/)?benchmarks\.md(#[\w-]+)?\)")


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
    return {"#" + re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.report"


@pytest.mark.parametrize("path", sorted([REPO / "README.md", *REPO.glob("docs/*.md")]), ids=lambda path: path.name)
def test_who_speaks_of_a_measurement_links_to_its_section(path: Path) -> None:
    linked = LINK.findall(path.read_text())
    assert set(linked) <= anchors(PAGE.read_text())
