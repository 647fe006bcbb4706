"""docs/benchmarks.md says what the result files say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2 import UndefinedError

from benchmarks.common import RESULTS
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
