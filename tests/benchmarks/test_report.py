"""docs/benchmarks.md says what the result files say."""

from __future__ import annotations

from benchmarks.report import PAGE, page


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.report"
