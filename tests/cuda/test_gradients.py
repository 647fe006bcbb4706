"""A gradient that is not finite, on a device whose norm is read a step late: found in time, whatever the optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated_cuda import needs_emulation
from tests.ranks import run_ranks
from tests.run.gradients import BAD_STEP

pytestmark = [pytest.mark.gpu, needs_emulation]

LATE = {"run.device": "cuda", "checkpoint.every_steps": 3}
"""Saves after steps 3 and 6: the norm of step 5 is read after step 6's forward."""
SKIPPED: dict[str, dict[str, Any]] = {
    "single": {},
    "single@sgd": {"optim.name": "sgd", "optim.momentum": 0.9},
    "single@bf16": {"precision.mode": "bf16"},
}
MADE: dict[str, dict[str, Any]] = {
    "single@foreach": {"optim.implementation": "foreach"},
    "single@muon": {"optim.name": "muon"},
    "single@adafactor": {"optim.name": "adafactor"},
}
TOGETHER: dict[str, dict[str, Any]] = {
    "ddp": {}, "fsdp": {}, "zero2": {}, "zero2@bf16": {"precision.mode": "bf16"}, "zero3": {},
}  # fmt: skip


@pytest.mark.parametrize(("world", "cases"), [(1, SKIPPED | MADE), (2, TOGETHER)], ids=["one rank", "two ranks"])
def test_the_update_is_skipped_on_the_device_or_never_saved(
    world: int, cases: dict[str, dict[str, Any]], tmp_path: Any
) -> None:
    late = {case: {**LATE, **extra} for case, extra in cases.items()}
    ranks = run_ranks(world, "tests.run.gradients:ends", gpu=True, cases=late, folder=str(tmp_path), how="nan")
    for rank in ranks:
        for case, found in rank.items():
            message, code = found["said"]
            assert code == 1 and f"the gradient is not finite at step {BAD_STEP}" in message, case
            assert ("nor is the state after its update" in message) is (case in MADE), case
            assert "blocks.0.inner" in message and "nothing after step 4 was saved" in message, case
            assert bool(found["spoiled"]) is (case in MADE), case
            assert found["saved"] == [3], case
            assert [line["step"] for line in found["lines"]] == list(range(1, BAD_STEP)), case
