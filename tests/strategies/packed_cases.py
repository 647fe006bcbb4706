"""Train on documents one by one, or packed, under each engine; the ranks' part of `test_packing`."""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist

from shardkit.config.schema import RunConfig
from shardkit.parallel.precision import to_device
from shardkit.run.job import start
from shardkit.tasks.load import load_task
from tests.models.test_packed_attention import MODELS, SEQ, Random, batches
from tests.strategies.cases import on_cpus

LENGTHS = [33, 4, 12, 9, 20, 7, 26, 3, 15, 30, 11, 5, 18, 8, 22, 6]


def curves(cases: list[tuple[str, str, str]], **extra: Any) -> list[list[tuple[float, float]]]:
    """(loss, gradient norm) of each step for each (model, strategy, packing), with `extra` settings."""
    return [_train(*case, extra) for case in cases]


def _train(model: str, strategy: str, packing: str, extra: dict[str, Any]) -> list[tuple[float, float]]:
    """Every step trains on all documents: rank r of n takes every n-th of them, in one micro-batch."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if strategy != "single" else (0, 1)
    mine = batches(packing, Random(LENGTHS, slice(rank, None, world)))
    keys = MODELS[model]
    sections: dict[str, Any] = {
        "task.name": "causal_lm" if model == "reference" else "hf_causal_lm",
        **on_cpus(strategy), "optim.lr": 3e-3, "data.packing": packing,
        "train.seq_len": SEQ, "train.micro_batch_size": len(LENGTHS), "train.grad_accum_steps": len(mine),
    }  # fmt: skip
    sections |= (
        {f"model.{key}": value for key, value in keys.items()}
        if model == "reference"
        else {"model.hf": {"model_type": model, **keys}, "model.loss_chunk_size": 7}
    )
    sections |= extra
    with start(None, sections) as job:
        config: RunConfig = job.config
        task: Any = load_task(config)
        job.wrap(task.build_model, init_parameter=task.init_parameter, block_classes=task.block_classes)
        curve = []
        mine = [to_device(micro_batch, job.world.device) for micro_batch in mine]
        for _ in range(3):
            result = job.step(mine, task.loss, task.n_targets)
            curve.append((result.loss, result.grad_norm))
    gc.collect()
    return curve
