"""Accelerate and DeepSpeed in one line: each rank's bytes, steps counted where they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.report.read import read_run
from tests.integrations.loops import NUMEL
from tests.ranks import run_ranks

STEP_COUNT = 4


def bytes_of(params: int, master: int, grads: int, optimizer: int) -> dict[str, int]:
    return {"params": params, "master_params": master, "grads": grads, "optimizer": optimizer}


@pytest.mark.slow
@pytest.mark.dist
def test_a_loop_of_accelerate_is_counted(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.integrations.loops:of_accelerate", folder=str(tmp_path), engine="ddp")[0]
    assert found["ranks"] == [bytes_of(4 * NUMEL, 0, 4 * NUMEL, 8 * NUMEL + 4 * STEP_COUNT)] * 2
    assert found["steps"] == [1, 2, 3] and len(found["losses"]) == 3
    assert read_run(tmp_path).setting("train.grad_accum_steps") == 2


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loop_of_deepspeed_is_counted(stage: int, tmp_path: Path) -> None:
    found = run_ranks(2, "tests.integrations.loops:of_deepspeed", folder=str(tmp_path), stage=stage)[0]
    expected = bytes_of(NUMEL if stage == 3 else 2 * NUMEL, 2 * NUMEL, NUMEL, 4 * NUMEL + STEP_COUNT)
    assert found["ranks"] == [expected] * 2
    assert found["steps"] == [1, 2, 3] and len(found["losses"]) == 3
    run = read_run(tmp_path)
    assert [run.setting(key) for key in ("parallel.strategy", "precision.mode")] == [f"zero{stage}", "bf16"]
