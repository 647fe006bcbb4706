"""Lightning's Trainer with a callback: bytes of every rank, and an out-of-memory error in its own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.memory import read_jsonl
from shardkit.report.read import read_run
from tests.commands import Done, python_m
from tests.integrations.lightning_run import NUMEL

pytest.importorskip("lightning", reason="needs lightning")
pytestmark = pytest.mark.slow


def fit(folder: Path, ranks: int, **settings: Any) -> Done:
    return python_m("tests.integrations.lightning_run", folder, json.dumps(settings), ranks=ranks, code=0)


@pytest.mark.parametrize("ranks", [0, 2])
def test_its_ranks_are_counted(ranks: int, tmp_path: Path) -> None:
    fit(tmp_path, ranks, **({"devices": 2, "strategy": "ddp"} if ranks else {}))
    gathers = list(read_jsonl(tmp_path / "memory.jsonl"))
    assert [step for step, _ in gathers] == [1, 2, 3]
    for row in gathers[-1][1]:
        assert row.state is not None and set(row.phases) == {"forward", "backward", "update"}
        assert [row.state[kind].device for kind in ("params", "grads", "optimizer")] == [
            4 * NUMEL, 4 * NUMEL, 8 * NUMEL + 4 * 4
        ]  # fmt: skip
    run = read_run(tmp_path)
    assert run.notes == [] and len(run.last_rows) == max(1, ranks)
    assert [run.setting(key) for key in ("train.micro_batch_size", "train.grad_accum_steps")] == [4, 2]
    assert [(line["step"], line["loss"] > 0) for line in run.metrics] == [(1, True), (2, True), (3, True)]


def test_the_loss_of_a_step_is_the_mean_over_its_micro_batches(tmp_path: Path) -> None:
    """Steps of 4 micro-batches, and one of 2 at the end of each epoch of 10."""
    done = fit(tmp_path, 0, accumulate_grad_batches=4, samples=40, max_steps=6)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("losses "))
    steps = json.loads(line.removeprefix("losses "))
    assert [len(losses) for losses in steps] == [4, 4, 2, 4, 4, 2]
    logged = [line["loss"] for line in read_run(tmp_path).metrics]
    assert logged == pytest.approx([sum(losses) / len(losses) for losses in steps], rel=1e-6)
