"""Loops of Accelerate and DeepSpeed on two ranks, as their users write them; for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.memory import read_jsonl
from tests.zero_ops import leave_out_shm

SIZE = 64
NUMEL = 2 * (SIZE * SIZE + SIZE)
KINDS = ("params", "master_params", "grads", "optimizer")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))


def seen(folder: Path) -> dict[str, Any]:
    """The steps and, of the last gather, each rank's bytes; on rank 0."""
    if dist.get_rank():
        return {}
    gathers = list(read_jsonl(folder / "memory.jsonl"))
    return {
        "steps": [step for step, _ in gathers],
        "ranks": [{kind: row.state[kind].device for kind in KINDS} for row in gathers[-1][1] if row.state],
        "losses": [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()],
    }


def of_accelerate(folder: str) -> dict[str, Any]:
    """Accelerate on CPUs is DDP; every second batch is one of accumulation."""
    from accelerate import Accelerator

    from shardkit.integrations.accelerate import watch

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    own = network()
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters()))
    with watch(accelerator, model, optimizer, run_dir=folder, every=2, tensorboard=False) as watching:
        for _ in range(6):
            with accelerator.accumulate(model):
                loss = model(torch.ones(4, SIZE)).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                watching.log(loss=loss)
    return seen(Path(folder))


def of_deepspeed(folder: str) -> dict[str, Any]:
    """Plain DeepSpeed, whose engine steps at every second call."""
    import deepspeed

    from shardkit.integrations.deepspeed import watch

    leave_out_shm()
    own = network()
    settings = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": True},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=own, optimizer=torch.optim.AdamW(own.parameters()), config=settings, dist_init_required=False
    )
    with watch(engine, run_dir=folder, every=2, tensorboard=False) as watching:
        for _ in range(6):
            loss = engine(torch.ones(4, SIZE, dtype=torch.bfloat16)).pow(2).mean()
            engine.backward(loss)
            engine.step()
            watching.log(loss=loss)
    engine.destroy()
    return seen(Path(folder))
