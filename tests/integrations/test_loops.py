"""Accelerate and DeepSpeed in one line: each rank's bytes, steps counted where they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.report.read import read_run
from tests.integrations.loops import NUMEL
from tests.ranks import run_ranks

STEP_COUNT = 4


@pytest.mark.dist
def test_a_loop_of_accelerate_is_counted(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.integrations.loops:of_accelerate", folder=str(tmp_path))[0]
    expected = {"params": 4 * NUMEL, "master_params": 0, "grads": 4 * NUMEL, "optimizer": 8 * NUMEL + 4 * STEP_COUNT}
    assert found["ranks"] == [expected] * 2
    assert found["steps"] == [1, 2, 3] and len(found["losses"]) == 3
    assert read_run(tmp_path).setting("train.grad_accum_steps") == 2


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_loop_of_deepspeed_is_counted(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.integrations.loops:of_deepspeed", folder=str(tmp_path))[0]
    expected = {
        "params": 2 * NUMEL, "master_params": 2 * NUMEL, "grads": NUMEL, "optimizer": 4 * NUMEL + STEP_COUNT,
    }  # fmt: skip
    assert found["ranks"] == [expected] * 2
    assert found["steps"] == [1, 2, 3] and len(found["losses"]) == 3
    run = read_run(tmp_path)
    assert [run.setting(key) for key in ("parallel.strategy", "precision.mode")] == ["zero2", "bf16"]
