"""Times on a device that needs time, while the host runs ahead of it: true, without gaps, and without a wait more."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.emulated_cuda import call, needs_emulation
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
