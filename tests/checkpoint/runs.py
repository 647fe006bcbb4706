"""Whole training runs, uninterrupted or stopped and resumed, as functions for `run_ranks`."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.strategies.cases import on_cpus

STEPS = 8


def settings(case: str, world: int, root: str, run: str, **extra: Any) -> dict[str, Any]:
    out = {
        "data.path": f"{root}/text", "data.cache_dir": f"{root}/cache", "run.dir": f"{root}/{run}",
        **on_cpus(case), "train.deterministic": True, "model.dropout": 0.1,
        "train.max_steps": STEPS, "train.seq_len": 16, "model.max_seq_len": 16, "train.micro_batch_size": 12 // world,
        "train.grad_accum_steps": 2, "train.eval_every": 3, "train.eval_samples": 12, "optim.lr": 3e-3,
        "model.d_model": 36, "model.n_layers": 2, "model.n_heads": 2, "memory.interval": 3, "logging.every": 1000,
        "logging.tensorboard": False, "checkpoint.every_steps": 1, "checkpoint.keep_last": 2,
    }  # fmt: skip
    if case == "ddp":
        out["parallel.bucket_mb"] = 0.02  # several buckets, so that their layout matters
    return out | extra


class Killed(Exception):
    """Stands for a kill: nothing of the trainer's own code runs after it but `finally`."""


def train(case: str, root: str, run: str, stop: int | None = None, **extra: Any) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of the steps taken now."""
    world, taken = dist.get_world_size(), []
    try:
        with start(None, settings(case, world, root, run, **extra)) as job:
            for record in Trainer(job).recorded_steps():
                taken.append((int(record["step"]), record["loss"], record["grad_norm"]))
                if record["step"] == stop:
                    raise Killed
    except Killed:
        pass
    gc.collect()
    torch.use_deterministic_algorithms(False)
    return taken


def cpu_adam_bits(stops: tuple[int, ...], steps: int) -> list[bool]:
    """After each step: whether a DeepSpeedCPUAdam made anew at `stops` has the bits of one that went through."""
    import os

    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from shardkit.strategies.zero.state import _replay_bias_correction

    def adam(param: torch.nn.Parameter) -> Any:
        return DeepSpeedCPUAdam([param], lr=1e-2, betas=(0.9, 0.95), adamw_mode=True)

    def step(optimizer: Any, param: torch.nn.Parameter, index: int) -> None:
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
        optimizer.step()

    start = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    through, again = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    uninterrupted, resumed = adam(through), adam(again)
    same = []
    for index in range(1, steps + 1):
        step(uninterrupted, through, index)
        if index in stops:
            state = resumed.state[again]
            resumed = adam(again)
            resumed.state[again] = state
            _replay_bias_correction(resumed)
        step(resumed, again, index)
        same.append(torch.equal(through, again))
    return same


def interrupted(names: list[str], root: str, stops: tuple[int, ...] = (3, 6), **extra: Any) -> dict[str, Any]:
    """Each case uninterrupted, and stopped at `stops`: (whole curve, curve in pieces, steps in what each run wrote)."""
    out = {}
    for case in names:
        tag = f"{case}@{dist.get_world_size()}"
        figures = train(case, root, f"{tag}-whole", **extra)
        pieces = []
        for stop in (*stops, None):
            is_first = stop == stops[0]
            pieces += train(case, root, f"{tag}-parts", stop, **{"run.resume": not is_first}, **extra)
        out[case] = (figures, pieces, [_recorded(Path(root) / f"{tag}-{run}") for run in ("whole", "parts")])
    return out


def _recorded(run: Path) -> list[list[int]]:
    """Steps in metrics.jsonl and in memory.jsonl."""
    files = [(run / name).read_text().splitlines() for name in ("metrics.jsonl", "memory.jsonl")]
    return [[int(json.loads(line)["step"]) for line in lines] for lines in files]
