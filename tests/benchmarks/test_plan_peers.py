"""Other tools' figures are compared with what they are about, and the planner's in the same cases only."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plan_peers import errors, with_gradients

MEASURED = {"predicted": 990, "measured": 1000, "resident_predicted": 300, "resident_measured": 300}
SAID = {"deepspeed": 380, "accelerate": 400, "memtracker": 1000, "n_params": 25}


def test_states_are_compared_with_states_and_peaks_with_peaks() -> None:
    rows = {"m single@1 fp32 none adamw": MEASURED, "m fsdp@2 fp32 none adamw": MEASURED}
    said: dict[str, dict[str, Any]] = {
        "m single@1 fp32 none adamw": SAID,
        "m fsdp@2 fp32 none adamw": {"n_params": 25, "fsdpmemtracker": "RuntimeError: no"},
    }
    said["m fsdp@4 fp32 none adamw"] = {"n_params": 25, "fsdpmemtracker": 1100}
    rows["m fsdp@4 fp32 none adamw"] = MEASURED
    found = errors(rows, said)
    states = found["accelerate: model states"]
    assert states["theirs"]["median_error"] == 0  # 300 between two steps and 25 gradients of 4 bytes
    assert states["ours"] == {
        "cases": 1, "median_error": 0, "lowest": 0, "highest": 0, "within_3_percent": 1,
    }  # fmt: skip
    assert found["accelerate: peak"]["theirs"]["lowest"] == pytest.approx(-0.6)
    assert found["memtracker: peak"]["ours"]["lowest"] == pytest.approx(-0.01)
    fsdp = found["fsdpmemtracker: peak"]
    assert fsdp["asked"] == 2
    assert fsdp["failed"] == {"m fsdp@2 fp32 none adamw": "RuntimeError: no"}
    assert fsdp["theirs"]["highest"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("strategy", "gradients"),
    [("single@1", 400), ("ddp@2", 0), ("fsdp@4", 100), ("hsdp@4", 200), ("zero2@2", 300), ("zero3@4+bucket", 150)],
)
def test_gradients_are_those_of_the_engine(strategy: str, gradients: int) -> None:
    assert with_gradients(f"m {strategy} bf16 none adamw", {"bytes": 0}, 100, "bytes") == gradients
