"""The built-in tasks on their debug models, trained by the trainer under every strategy in turn."""

from __future__ import annotations

import gc
from typing import Any

from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.strategies.cases import on_cpus

STEPS, GLOBAL_BATCH = 3, 8
TASKS: dict[str, dict[str, Any]] = {
    "gpt2": {"task.name": "hf_causal_lm", "model.preset": "gpt2-debug", "model.loss_chunk_size": 50},
    "llama": {"task.name": "hf_causal_lm", "model.preset": "llama-debug"},
    "bert": {"task.name": "hf_masked_lm", "model.preset": "bert-debug"},
    "vit": {"task.name": "image_classification", "model.preset": "vit-debug"},
    "swin2sr": {"task.name": "super_resolution", "model.preset": "swin2sr-debug", "data.crop_size": 32},
}


def settings(task: str, strategy: str, world: int, folder: str, **extra: Any) -> dict[str, Any]:
    out = {
        **on_cpus(strategy), "run.dir": f"{folder}/{task}-{strategy}-{world}",
        "train.max_steps": STEPS, "train.micro_batch_size": GLOBAL_BATCH // 2 // world, "train.grad_accum_steps": 2,
        "train.max_norm": 1.0, "train.eval_samples": GLOBAL_BATCH, "optim.lr": 3e-3, "logging.tensorboard": False,
        "checkpoint.at_end": False, **TASKS[task], **extra,
    }  # fmt: skip
    if out["task.name"] in ("hf_causal_lm", "hf_masked_lm"):
        out |= {"train.seq_len": 24, "data.path": f"{folder}/text.txt", "data.cache_dir": f"{folder}/cache"}
    return out


def records(tasks: list[str], strategies: list[str], folder: str, **extra: Any) -> dict[tuple[str, str], list[Any]]:
    """(task, strategy) -> what the trainer recorded of each step."""
    import torch.distributed as dist

    world = dist.get_world_size()
    out = {}
    for task in tasks:
        for strategy in strategies:
            with start(None, settings(task, strategy, world, folder, **extra)) as job:
                out[task, strategy] = list(Trainer(job).steps())
            gc.collect()
    return out
