"""Loops of Accelerate and DeepSpeed on two ranks, as their users write them; for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.memory import read_jsonl
from tests.cuda.parity_ranks import join
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
        "phases": [sorted(row.phases) for row in gathers[-1][1]],
        "losses": [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()],
    }


def of_accelerate(folder: str, engine: str) -> dict[str, Any]:
    """Accelerate, whose DDP runs on CPUs and all else on GPUs; every second batch is one of accumulation."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin

    from shardkit.integrations.accelerate import watch

    plugins: dict[str, Any] = {}
    if engine == "fsdp":
        policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    elif engine.startswith("zero"):
        leave_out_shm()
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=_zero(int(engine[-1]), bf16=False))
    if plugins:  # Accelerate leaves them out on CPUs
        join("nccl")
    accelerator = Accelerator(cpu=not plugins, gradient_accumulation_steps=2, **plugins)
    own = network()
    batches = torch.utils.data.DataLoader(torch.ones(48, SIZE), batch_size=4)
    model, optimizer, data = accelerator.prepare(own, torch.optim.AdamW(own.parameters()), batches)
    with watch(accelerator, model, optimizer, run_dir=folder, every=2, tensorboard=False) as watching:
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(batch).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                watching.log(loss=loss)
    return seen(Path(folder))


def _zero(stage: int, bf16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": bf16},
    }  # fmt: skip


def of_deepspeed(folder: str, stage: int) -> dict[str, Any]:
    """Plain DeepSpeed, whose engine steps at every second call."""
    import deepspeed

    from shardkit.integrations.deepspeed import watch

    leave_out_shm()
    own = network()
    engine, *_ = deepspeed.initialize(
        model=own, optimizer=torch.optim.AdamW(own.parameters()), config=_zero(stage, bf16=True),
        dist_init_required=False,
    )  # fmt: skip
    with watch(engine, run_dir=folder, every=2, tensorboard=False) as watching:
        for _ in range(10):
            loss = engine(torch.ones(4, SIZE, dtype=torch.bfloat16)).pow(2).mean()
            engine.backward(loss)
            engine.step()
            watching.log(loss=loss)
    engine.destroy()
    return seen(Path(folder))
