"""A rank that runs out of memory, and a disk that is full: the job ends soon and says who and where, or goes on."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkit.memory import read_jsonl
from tests.commands import python_m
from tests.disks import mounted
from tests.launch.jobs import REPO, command, run

MIB = 2**20
BOUND_S = 240
"""Where a rank waits for another in vain, it does so for `run.step_timeout_s`, ten minutes."""


def settings(run_dir: Path, how: str, *more: str) -> list[str]:
    return [
        f"run.dir={run_dir}", "run.device=cpu", "train.max_steps=6", "train.grad_accum_steps=1",
        "task.factory=tests.faults.tasks:Hungry", f"task.args.how={how}", "logging.tensorboard=false", *more,
    ]  # fmt: skip


def post_mortem(run_dir: Path, rank: int = 1) -> dict[str, Any]:
    return json.loads((run_dir / f"oom/rank{rank}.json").read_text())


def whole_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_one_rank_out_of_memory_ends_the_job_with_its_name_and_what_would_help(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    stale = {"schema": 1, "kind": "device", "time": time.time() - 3600, "rank": 0, "advice": [], "memory": {}}
    (run_dir / "oom").mkdir(parents=True)
    (run_dir / ".shardkit").mkdir()  # of an earlier start
    (run_dir / "oom/rank0.json").write_text(json.dumps(stale))
    argv = settings(run_dir, "forward", "memory.cap=64MiB", f"task.args.n_bytes={65 * MIB}", "memory.interval=1")
    done = run(command("--nproc-per-node", "2", "--max-restarts", "3", *argv), timeout=BOUND_S, code=3)
    assert re.search(r"^error: rank 1 .* in forward of step 3 \(2\): .* 65.0 MiB .*memory.cap=64MiB", done.stderr, re.M)
    assert "train.micro_batch_size=4 train.grad_accum_steps=2" in done.stderr and " saves 0.0 GiB" not in done.stderr
    assert "parallel.strategy=fsdp" in json.dumps(post_mortem(run_dir)["advice"])
    assert f"post-mortem: {run_dir}/oom/rank1.json" in done.stderr
    assert "1 other rank(s) ended because of it: 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run_dir / "logs/restarts.jsonl").exists(), "it would ask for the same again"
    found = post_mortem(run_dir)
    assert (found["rank"], found["phase"], found["step"], found["module"]) == (1, "forward", 3, "2")
    assert found["request"] == 65 * MIB and found["memory"]["limit"] == 64 * MIB
    assert found["memory"]["free"] + found["memory"]["allocated"] == 64 * MIB
    assert "tests/faults/tasks.py" in found["at"] and found["gaps"] == []
    assert [line["step"] for line in whole_lines(run_dir / "metrics.jsonl")] == [1, 2]
    assert [line["step"] for line in whole_lines(run_dir / "memory.jsonl")] == [1, 2]


@pytest.mark.slow
def test_under_plain_torchrun_the_rank_says_it_itself(tmp_path: Path) -> None:
    argv = settings(
        tmp_path, "recompute", "memory.cap=64MiB", f"task.args.n_bytes={65 * MIB}", "activation.policy=full"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, "-m", "shardkit.train", *argv], timeout=BOUND_S)
    assert done.returncode == 1, "torchrun's own code for a rank that failed"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(r"rank 1 .* in backward of step 3 \(2\): .* 65.0 MiB .*memory.cap=64MiB", line)
    assert "  fix: set train.micro_batch_size=" in done.stderr and f"see {tmp_path}/oom/rank1.json" in done.stderr
    assert "exitcode  : 3" in done.stderr


@pytest.mark.release
@pytest.mark.parametrize("strategy", ["single", "fsdp", "zero1", "zero3"])
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_every_engine_says_where(strategy: str, how: str, tmp_path: Path) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed", reason="needs deepspeed")
    world = 1 if strategy == "single" else 2
    more = [f"parallel.strategy={strategy}", f"task.args.rank={world - 1}", "task.args.calls=2", "precision.mode=fp32"]
    argv = settings(tmp_path / "run", how, "memory.cap=64MiB", f"task.args.n_bytes={65 * MIB}", *more)
    run(command("--nproc-per-node", str(world), *argv, config=REPO / "configs/fsdp.yaml"), timeout=BOUND_S, code=3)
    found = post_mortem(tmp_path / "run", world - 1)
    assert (found["phase"], found["step"], found["request"]) == (how, 2, 65 * MIB)
    assert found["module"] == ("2" if how == "forward" else None)
    assert found["gaps"] == []
    named = {tensor["category"] for tensor in found["tensors"]}
    assert {"params", "optimizer"} <= named or "master_params" in named


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; needs root."""
    with mounted(tmp_path / "disk") as disk:
        yield disk


def test_a_full_disk_costs_log_lines_and_checkpoints_but_not_the_run(small_disk: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

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
    # TensorBoard's own reader passes over an event that was cut short.
    assert any([*EventFileLoader(str(path)).Load()] for path in (run_dir / "tensorboard").iterdir())
