"""The learning-rate schedule at its edges."""

from __future__ import annotations

import math

import pytest

from shardkit.config.schema import OptimConfig
from shardkit.parallel.optim import lr_at

STEPS = 10


def rates(max_steps: int = STEPS, **settings: object) -> list[float]:
    config = OptimConfig(lr=1.0, **settings)
    return [lr_at(config, step, max_steps) for step in range(1, max_steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 4, 9, 10, 12])
def test_the_rise_is_exact_the_peak_lasts_one_step_and_the_last_step_has_the_floor(schedule: str, warmup: int) -> None:
    found = rates(schedule=schedule, warmup_steps=warmup, min_lr_ratio=0.1)
    for step in range(1, min(warmup, STEPS) + 1):
        assert found[step - 1] == step / warmup
    assert found.count(1.0) == (warmup <= STEPS), "one step has the peak"
    if warmup < STEPS:
        assert found[-1] == 0.1, "exactly"
        fall = found[max(warmup, 1) - 1 :]
        assert fall == sorted(fall, reverse=True)


def test_what_lies_between() -> None:
    linear, cosine = (rates(7, schedule=s, warmup_steps=2, min_lr_ratio=0.0) for s in ("linear", "cosine"))
    assert linear == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    assert cosine[2:] == pytest.approx([0.5 * (1 + math.cos(math.pi * k / 5)) for k in range(1, 6)])
    assert rates(4, schedule="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(1, schedule="cosine") == [1.0], "a single step has the peak"
