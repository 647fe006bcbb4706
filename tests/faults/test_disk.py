"""A disk that fills up under the run directory: notes are lost, the run goes on, what is there can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.memory import read_jsonl
from tests.commands import python_m
from tests.disks import mounted

BOUND_S = 240
"""Where a rank waits for another in vain, it does so for `run.step_timeout_s`, ten minutes."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; needs root."""
    with mounted(tmp_path / "disk") as disk:
        yield disk


@pytest.mark.dist
def test_a_full_disk_costs_log_lines_and_checkpoints_but_not_the_run(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    argv = [
        f"run.dir={run_dir}", "run.device=cpu", "train.max_steps=40", "train.grad_accum_steps=1", "memory.interval=1",
        "task.factory=tests.faults.tasks:Hungry", "task.args.how=fill", "task.args.rank=0", "task.args.width=32",
        "logging.every=1", "logging.tensorboard=true", "checkpoint.every_steps=20",
    ]  # fmt: skip
    done = python_m("shardkit.train", *argv, "parallel.strategy=ddp", ranks=2, timeout=BOUND_S)
    assert done.returncode == 5, done.stderr + done.stdout[-2000:]
    assert "error: the last save, of step 40, failed: rank 0: " in done.stderr, "there was room for its last word"
    assert done.stderr.count(f"cannot write {run_dir}/memory.jsonl: No space left on device") == 1, "said once"
    assert "checkpoint of step 20 failed, the run goes on" in done.stderr
    rows = list(read_jsonl(run_dir / "memory.jsonl"))
    assert 2 <= len(rows) < 40, "every line that is there is whole"
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and 2 <= len(steps) < 40
    assert _events(run_dir / "tensorboard") >= 1


def _events(folder: Path) -> int:
    """Events that TensorBoard's own reader finds; it passes over one that was cut short."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return sum(1 for path in folder.iterdir() for _ in EventFileLoader(str(path)).Load())
