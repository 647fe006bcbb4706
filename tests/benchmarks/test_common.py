from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.common import (
    RESULTS,
    one_case_a_line,
    stamp,
    unmeasured,
    write_result,
)


def test_a_result_names_the_machine_and_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    path = write_result("speed", {"ratio": 1.01})
    written = json.loads(path.read_text())
    assert path.name == "speed.json"
    assert written["ratio"] == 1.01
    known = {
        "cpu", "cores", "memory_gib", "gpus", "platform", "python", "torch", "deepspeed", "shardkit", "commit", "date",
    }  # fmt: skip
    assert set(written["environment"]) == known
    assert written["environment"]["cores"] >= 1


def test_an_interrupted_measurement_goes_on_with_what_this_commit_lacks() -> None:
    found = {"ddp": {"measured": stamp()}, "fsdp": {"measured": {"commit": "of another day"}}, "zero2": {}}
    assert unmeasured(["single", "ddp", "fsdp", "zero2"], found) == ["single", "fsdp", "zero2"]


def test_recorded_results_are_in_that_layout() -> None:
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 10
    for path in files:
        text = path.read_text()
        assert text == one_case_a_line(json.loads(text)) + "\n", f"write {path.name} with benchmarks.common.write_json"
