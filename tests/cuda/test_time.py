"""On a device that the host runs ahead of, times are true, without gaps, and a bad gradient is found in time."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.emulated_cuda import call, needs_emulation
from tests.ranks import run_ranks
from tests.run.gradients import BAD_STEP
from tests.run.test_steps import tiles, timed
from tests.timing import measured_again

pytestmark = [pytest.mark.gpu, needs_emulation]

KERNEL_S = 0.004
"""Longer than the host needs for an operator, also on a busy machine."""
SLOW = {"EMUCUDA_KERNEL_US": str(int(1e6 * KERNEL_S))}


def on_card(folder: str) -> Any:
    return timed(folder, **{"run.device": "cuda"})


def judge(records: list[dict[str, float]], took: float) -> None:
    assert tiles(records) == pytest.approx(took, rel=0.02)
    times = [record["step_time_s"] for record in records[1:]]
    assert min(times) > 0.8 * median(times), "a step is not done when its kernels are launched"


@measured_again
def test_steps_last_as_long_as_the_device_works_on_them(tmp_path: Any) -> None:
    judge(*call(on_card, str(tmp_path / "run"), **SLOW))


def back_to_back(folder: str) -> Any:
    """Times of steps after which nothing is saved or judged."""
    plain = {"checkpoint.every_steps": None, "train.eval_every": None, "memory.interval": 1000}
    return timed(folder, own_s=0.0, **{"run.device": "cuda", **plain})


@measured_again
def test_the_device_never_waits_for_the_host(tmp_path: Any) -> None:
    """If the host waited for a step's norm before it launches the next step, the device would be idle meanwhile."""
    records, _ = call(back_to_back, str(tmp_path / "run"), **SLOW)
    times = [record["step_time_s"] for record in records[2:-1]]
    assert max(times) - min(times) < KERNEL_S, times


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
