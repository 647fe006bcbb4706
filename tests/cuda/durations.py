"""Trainings on kernels of a given duration, for tests of the times that a run reports; imported by fresh processes."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.config.load import load_config
from shardkit.hardware import calibration
from shardkit.hardware.collectives import measure
from shardkit.plan.client import Planner
from shardkit.plan.target import choose_target
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.run import gradients

STEPS = 7
SLOW_BATCHES = (3, 5)
"""Steps whose data take `fetch_s` to read."""
EXTRA = 200
"""Kernels of each phase beside the model's: the few that the step adds to a phase are then below 1 % of it."""
PHASES = ("forward", "backward", "update")
DEVICE = "NVIDIA H100 80GB HBM3"
SIDE = 8192


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
    """`EXTRA` kernels in forward, and `host_s` in which the host launches nothing; after `watch` in each phase."""

    def __init__(self, config: Any, fetch_s: float = 0.0, host_s: float = 0.0, extra: int = EXTRA) -> None:
        super().__init__(config, "fine")
        self.extra = extra
        self.fetch_s, self.host_s, self.in_all_phases = fetch_s, host_s, False
        self.spans: dict[str, list[tuple[int, float]]] = {phase: [] for phase in PHASES}

    def dataset(self, split: str) -> Any:
        rows = super().dataset(split)
        return None if rows is None else Rows(rows, self.fetch_s)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        with self.counted("forward"):
            self.work(batch[0])
            found = super().loss(model, batch)
        if self.in_all_phases:
            found.register_hook(self.work)
        return found

    def work(self, near: torch.Tensor) -> None:
        x = near.detach()
        for _ in range(self.extra):
            x = x + 1
        time.sleep(self.host_s)

    @contextlib.contextmanager
    def counted(self, phase: str) -> Iterator[None]:
        """Note how many kernels are launched inside, and for how many seconds."""
        before, began = kernels(), time.perf_counter()
        yield
        self.spans[phase].append((kernels() - before, time.perf_counter() - began))

    def watch(self, strategy: Any) -> None:
        """Work in backward and the update, too, and count there."""
        self.in_all_phases = True

        def around(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any) -> Any:
                with self.counted(phase):
                    return call(*args)

            return counted

        strategy.backward = around("backward", strategy.backward)
        strategy.step = around("update", strategy.step)
        near = torch.zeros(1, device="cuda")
        strategy.optimizer.register_step_pre_hook(lambda *_: self.work(near))

    def flops_per_token(self) -> float:
        return 2e12


class Products(gradients.Task):
    """A model that does nothing but multiply matrices as large as those that the calibration multiplies."""

    block_classes = ()

    def build_model(self) -> nn.Module:
        return Multiplied()


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(3)))

    def forward(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.new_ones(SIDE, SIDE))
        return found.sum()


def calibrated(folder: str, task: str, args: dict[str, Any]) -> tuple[float, list[float]]:
    """Calibrate this card, plan a training for it, and train: (planned seconds of a step, seconds of each step)."""
    settings = gradients.settings("single", folder, "fine") | {
        "task.factory": f"tests.cuda.durations:{task}", "task.args": args, "run.device": "cuda", "train.max_steps": 6,
        "checkpoint.every_steps": None, "checkpoint.at_end": False, "train.eval_samples": 0, "memory.plan": False,
    }  # fmt: skip
    loaded = load_config(None, settings)
    measured = measure(loaded.config)
    assert measured is not None
    calibration.save(measured[0])
    with Planner(choose_target(loaded.config, gpu="h100")) as planner:
        planned = planner.predict(loaded.config, timed=True).time
    assert planned is not None and planned.measured
    with start(loaded) as job:
        times = [record["step_time_s"] for record in Trainer(job).recorded_steps()]
    gc.collect()
    return planned.seconds, times


def kernels() -> int:
    """Operations with a duration that this process has launched so far."""
    import emucuda

    made = emucuda.counts()
    return sum(made[name] for name in ("emulated_operator", "launch", "gemm", "copy_d2d", "memset"))


def trained(
    folder: str, strategy: str = "single", max_steps: int = STEPS, accum: int = 1, **args: Any
) -> dict[str, Any]:
    """Run; by step its record, the kernels launched between two updates and the host's seconds between them.

    `phases`: by name the (kernels, host's seconds) of every run of a phase; of forward alone with several ranks.
    """
    settings = gradients.settings(strategy, folder, "fine")
    settings |= {
        "task.factory": "tests.cuda.durations:Task", "task.args": args, "run.device": "cuda", "memory.interval": 2,
        "train.max_steps": max_steps, "checkpoint.every_steps": None, "checkpoint.at_end": False, "logging.every": 1,
        "train.eval_samples": 0,
    }  # fmt: skip
    settings |= {"train.grad_accum_steps": accum, "train.micro_batch_size": settings["train.micro_batch_size"] // accum}
    launched: list[int] = []
    at: list[float] = []

    def updated(*_: Any) -> None:
        launched.append(kernels())
        at.append(time.perf_counter())

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), start(None, settings) as job:
        trainer = Trainer(job)
        if strategy == "single":
            trainer.task.watch(job.strategy)  # type: ignore[attr-defined]
        job.optimizer.register_step_post_hook(updated)
        records = list(trainer.recorded_steps())
        phases = trainer.task.spans  # type: ignore[attr-defined]
    gc.collect()
    lines = (Path(folder) / "memory.jsonl").read_text().splitlines() if job.world.is_main else []
    return {
        "records": records, "launched": [b - a for a, b in pairwise(launched)], "phases": phases,
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
