"""Runs that the tests of this folder put on the cluster, and what they ask about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.launch.jobs import settings


def steady(run_dir: Path, steps: int = 60, **extra: Any) -> list[str]:
    """Overrides of a run whose steps take 50 ms, the same bits each time."""
    return settings(run_dir, "wait", train__max_steps=steps, train__deterministic="true", **extra)


def with_task(run_dir: Path, factory: str, **extra: Any) -> list[str]:
    """Overrides of a tiny run of a task of tests/slurm/tasks.py."""
    args = settings(run_dir, task__factory=f"tests.slurm.tasks:{factory}", **extra)
    return [item for item in args if not item.startswith("task.args.how=")]


def tiny(run_dir: Path, text: Path, strategy: str) -> list[str]:
    """Overrides of a small language model for five steps of 8 samples, whatever the number of ranks."""
    values = {
        "run.dir": run_dir, "run.device": "cpu", "data.path": text, "data.cache_dir": text / ".cache",
        "train.max_steps": 5, "train.seq_len": 32, "train.micro_batch_size": 2, "train.global_batch_size": 8,
        "train.eval_samples": 0, "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "optim.lr": 0.01,
        "parallel.strategy": strategy, "logging.tensorboard": "false",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def record(run_dir: Path) -> list[dict[str, Any]]:
    """restarts.jsonl."""
    return [json.loads(line) for line in (run_dir / "logs/restarts.jsonl").read_text().splitlines()]


def reasons(run_dir: Path) -> list[str]:
    """Why each start that could say so ended."""
    return [event["reason"] for event in record(run_dir) if event["event"] == "end"]
