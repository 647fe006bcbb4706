"""Trainings on kernels of a given duration, for tests of the times that a run reports; imported by fresh processes."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.run import gradients

STEPS = 7
SLOW_BATCHES = (3, 5)
"""Steps whose data take `fetch_s` to read."""
EXTRA = 200
"""Kernels of a forward beside the model's: the few that the step adds to the loss are then below 1 % of it."""
DEVICE = "NVIDIA H100 80GB HBM3"


class Rows:
    """One row a step; those of `SLOW_BATCHES` take their time."""

    def __init__(self, rows: Any, fetch_s: float) -> None:
        self.rows, self.fetch_s = rows, fetch_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        step, first = index // gradients.ROWS + 1, index % gradients.ROWS == 0
        if first and step in SLOW_BATCHES:
            time.sleep(self.fetch_s)
        return self.rows[index]


class Task(gradients.Task):
    """`EXTRA` kernels in each forward, and `host_s` in which the host launches nothing."""

    def __init__(self, config: Any, fetch_s: float = 0.0, host_s: float = 0.0) -> None:
        super().__init__(config, "fine")
        self.fetch_s, self.host_s = fetch_s, host_s
        self.launched: list[tuple[int, int]] = []

    def dataset(self, split: str) -> Any:
        rows = super().dataset(split)
        return None if rows is None else Rows(rows, self.fetch_s)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        began = kernels()
        x = batch[0].detach()
        for _ in range(EXTRA):
            x = x + 1
        time.sleep(self.host_s)
        found = super().loss(model, batch)
        self.launched.append((began, kernels()))
        return found

    def flops_per_token(self) -> float:
        return 2e12


def kernels() -> int:
    """Operations with a duration that this process has launched so far."""
    import emucuda

    made = emucuda.counts()
    return sum(made[name] for name in ("emulated_operator", "launch", "gemm", "copy_d2d", "memset"))


def trained(folder: str, strategy: str = "single", max_steps: int = STEPS, **args: Any) -> dict[str, Any]:
    """Run; by step what it recorded, how many kernels it launched, and when the host had launched its update."""
    settings = gradients.settings(strategy, folder, "fine")
    settings |= {
        "task.factory": "tests.cuda.durations:Task", "task.args": args, "run.device": "cuda", "memory.interval": 2,
        "train.max_steps": max_steps, "checkpoint.every_steps": None, "checkpoint.at_end": False, "logging.every": 1,
        "train.eval_batches": 0,
    }  # fmt: skip
    launched: list[int] = []
    at: list[float] = []

    def updated(*_: Any) -> None:
        launched.append(kernels())
        at.append(time.perf_counter())

    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), start(None, settings) as job:
        trainer = Trainer(job)
        job.optimizer.register_step_post_hook(updated)
        records = list(trainer.recorded_steps())
        forward = trainer.task.launched  # type: ignore[attr-defined]
    gc.collect()
    lines = (Path(folder) / "memory.jsonl").read_text().splitlines() if job.world.is_main else []
    return {
        "records": records, "launched": [b - a for a, b in pairwise(launched)], "forward": [b - a for a, b in forward],
        "updated_s": [b - a for a, b in pairwise(at)], "gathers": [json.loads(line) for line in lines],
        "mfu": [float(n) for n in re.findall(r"MFU ([\d.]+) %", shown.getvalue())],
        "kernel_s": int(os.environ["EMUCUDA_KERNEL_US"]) / 1e6,
    }  # fmt: skip


def one_of_ranks(folder: str, rank: int, strategy: str) -> dict[str, Any]:
    """The run of one of two ranks."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cuda"}
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    found = trained(f"{folder}/run", strategy)
    dist.destroy_process_group()
    return found
