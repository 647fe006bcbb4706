"""docs/benchmarks.md says what the result files say; the settings of runs that benchmarks start are accepted."""

from __future__ import annotations

import json

import pytest
from jinja2 import UndefinedError

from benchmarks import auto, overhead, sft, sft_arms
from benchmarks.common import RESULTS, one_case_a_line
from benchmarks.report import PAGE, page, rendered
from shardkit.config import capability
from shardkit.config.load import load_config, resolve_batch


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.report"


def test_a_template_without_a_value_is_refused() -> None:
    with pytest.raises(UndefinedError, match="cases"):
        rendered("plan", {"environment": {}})


def test_recorded_results_are_in_that_layout() -> None:
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 10
    for path in files:
        text = path.read_text()
        assert text == one_case_a_line(json.loads(text)) + "\n", f"write {path.name} with benchmarks.common.write_json"


RUNS = {
    **{engine: overhead.overrides(engine, "tokens.bin", "run", 4) for engine in overhead.ENGINES},
    **{
        f"sft, {tuned} {layout}": sft_arms.overrides(sft_arms.Setting(tuned, layout, "model", "chats.jsonl"), 4, "run")
        for tuned, layout in sft.SETTINGS
    },
    **{f"auto, {cell}": [*auto.BASE, *auto.settings_of(*cell)] for cell in auto.GRID[::7]},
}


@pytest.mark.parametrize("name", RUNS)
def test_settings_are_accepted_on_two_ranks(name: str) -> None:
    config = load_config(None, RUNS[name]).config
    capability.check(config, device="cpu", world_size=2, local_world_size=2)
    assert resolve_batch(config, 2) >= 1
