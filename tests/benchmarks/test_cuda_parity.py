"""The table of parity: sets of cases are run and written apart."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import cuda_parity
from benchmarks.report import rendered
from tests.cuda import parity


@pytest.mark.slow
def test_a_set_that_was_not_run_stays_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = parity.covering()[0]
    wanted = {
        "losses": {case.wanted: [1.0, 0.5]},
        "elements": {case.wanted: 7},
        "spread": {f"{case.optimizer} {case.layers} bf16": {"loss": 1.0, "weights": 1.0}},
    }
    result = {
        "case": asdict(case), "losses": [1.0, 0.5], "weights": 0.0, "elements": 7, "elsewhere": 0, "scales": [512.0],
    }  # fmt: skip
    late = {"asked": 13, "commit": "an earlier one", "rows": {}}
    monkeypatch.setattr(cuda_parity, "WRITTEN", tmp_path / "written.json")
    (tmp_path / "written.json").write_text(json.dumps({"sets": {"late": late, "pairs": late}}))
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    (tmp_path / "pairs.jsonl").write_text(json.dumps(result) + "\n")
    sets = cuda_parity.collected(tmp_path)["sets"]
    assert sets["late"] == late and set(sets) == {"late", "pairs"}
    assert sets["pairs"]["asked"] == len(parity.covering()) and sets["pairs"]["commit"] != "an earlier one"
    (row,) = sets["pairs"]["rows"].values()
    assert row == {"cases": 1, "loss": 0.0, "weights": 0.0, "wrong": {}}


def test_the_page_says_how_much_of_each_set_ran() -> None:
    result = json.loads(cuda_parity.WRITTEN.read_text())
    page = rendered("cuda_parity", result)
    for found in result["sets"].values():
        run = sum(row["cases"] for row in found["rows"].values())
        assert f"{run} of {found['asked']} cases run at {found['commit'][:10]}" in page
