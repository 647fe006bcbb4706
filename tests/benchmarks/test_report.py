"""docs/benchmarks.md says what the result files say."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from benchmarks.report import PAGE, page, rendered


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.report"


def test_a_template_without_a_value_is_refused() -> None:
    with pytest.raises(UndefinedError, match="cases"):
        rendered("plan", {"environment": {}})
