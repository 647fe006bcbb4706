from __future__ import annotations

import json

from benchmarks.common import RESULTS, one_case_a_line


def test_recorded_results_are_in_that_layout() -> None:
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 10
    for path in files:
        text = path.read_text()
        assert text == one_case_a_line(json.loads(text)) + "\n", f"write {path.name} with benchmarks.common.write_json"
