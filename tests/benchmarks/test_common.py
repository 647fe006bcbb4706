from __future__ import annotations

import json

from benchmarks.common import (
    RESULTS,
    one_case_a_line,
    stamp,
    unmeasured,
)


def test_an_interrupted_measurement_goes_on_with_what_this_commit_lacks() -> None:
    found = {"ddp": {"measured": stamp()}, "fsdp": {"measured": {"commit": "of another day"}}, "zero2": {}}
    assert unmeasured(["single", "ddp", "fsdp", "zero2"], found) == ["single", "fsdp", "zero2"]


def test_recorded_results_are_in_that_layout() -> None:
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 10
    for path in files:
        text = path.read_text()
        assert text == one_case_a_line(json.loads(text)) + "\n", f"write {path.name} with benchmarks.common.write_json"
