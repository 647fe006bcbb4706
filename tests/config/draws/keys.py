"""The keys that a draw may set: those of the schema with a closed set of values, and numbers chosen here."""

from __future__ import annotations

import random
import types
from typing import Any, Literal, Union, get_args, get_origin

from shardkit.config.schema import section_fields

NUMBERS: dict[str, list[Any]] = {
    "model.loss_chunk_size": [0, 16, 1024], "adapter.r": [1, 4], "adapter.alpha": [4, 16],
    "data.val_fraction": [0.1, 0.3], "data.mask_fraction": [0.15, 0.5], "data.mask_token": [0, 5],
    "data.crops_per_image": [1, 8], "data.workers": [0, 1], "data.prefetch": [1, 3], "data.max_bad_rows": [0.0, 0.5],
    "data.tokenize_workers": [1, 2], "train.micro_batch_size": [1, 2, 4], "train.seq_len": [16, 24],
    "train.grad_accum_steps": [1, 2], "train.max_norm": [None, 0.1, 5.0], "train.seed": [1, 77],
    "train.eval_every": [1, 2], "train.sample_prompts": [["number 1"]], "train.sample_tokens": [2, 4],
    "train.sample_temperature": [0.0, 0.7], "train.ema_decay": [0.5, 0.9], "optim.lr": [1e-3, 1e-2],
    "optim.weight_decay": [0.0, 0.3], "optim.betas": [[0.5, 0.9]], "optim.eps": [1e-6], "optim.momentum": [0.0, 0.9],
    "optim.warmup_steps": [1, 2], "optim.min_lr_ratio": [0.0, 1.0], "parallel.dp_replicate": [1, 2], "parallel.cp": [2],
    "parallel.dp_shard": [1, 2], "parallel.bucket_mb": [0.01, 1.0], "parallel.prefetch": [1, 2], "parallel.hpz": [2],
    "parallel.offload_ratio": [0.5, 1.0], "precision.loss_scale_init_power": [4, 12],
    "precision.loss_scale_window": [1, 1000], "activation.every_k": [1, 2, 3], "activation.budget": [0.0, 0.5, 1.0],
    "activation.offload_min_bytes": [0, 4096], "activation.block_classes": [["Block"], ["NoSuchClass"]],
    "checkpoint.every_steps": [1, 2], "checkpoint.every_minutes": [10.0], "checkpoint.keep_last": [1, None],
    "checkpoint.timeout_s": [120.0], "memory.interval": [1, 2], "memory.trace_step": [1, 2],
    "memory.cap": ["8GiB", "1MiB"], "memory.host_warn": [0.5, 1.0], "profile.start": [2], "profile.steps": [1],
    "logging.every": [1, 3], "run.init_timeout_s": [300.0], "run.step_timeout_s": [300.0],
}  # fmt: skip
"""Values of keys whose type does not list them."""

LEFT_OUT = {
    "task.name": "every draw has a task",
    "task.factory": "a task of the user's own", "task.args": "a task of the user's own",
    "model.preset": "each task's small model", "model.hf_config": "a file", "model.hf": "keys of transformers",
    "model.init_from": "a file", "model.resize_embeddings": "needs a tokenizer",
    "model.quantize": "the rows of the small models are no multiples of a block",
    "model.vocab_size": "the task's small model", "model.max_seq_len": "the task's small model",
    "model.d_model": "the task's small model", "model.n_layers": "the task's small model",
    "model.n_heads": "the task's small model", "model.dropout": "ranks draw different elements than one process",
    "adapter.dropout": "ranks draw different elements than one process", "adapter.targets": "names of layers",
    "data.path": "a folder", "data.val_path": "a folder", "data.bin_dtype": "a file of tokens",
    "data.tokenizer": "a file", "data.chat_template": "a file", "data.columns": "records",
    "data.sources": "folders", "data.cache_dir": "a folder", "data.crop_size": "the task's small model",
    "data.chat_date": "records", "data.ignore": "records",
    "train.max_steps": "the length of every draw", "train.epochs": "the same",
    "train.global_batch_size": "the same on any number of ranks",
    "train.eval_samples": "the samples of an evaluation are the same in every draw",
    "parallel.strategy": "every draw has one", "parallel.nvme_path": "a disk",
    "parallel.ds_config": "DeepSpeed's keys",
    "compile.enabled": "minutes of compilation", "compile.mode": "minutes of compilation",
    "compile.scope": "minutes of compilation", "memory.plan": "a process of its own beside the run",
    "profile.ranks": "the number of ranks differs", "logging.wandb_project": "a service",
    "logging.prometheus_port": "a port", "logging.prometheus_host": "a port",
    "run.dir": "a folder", "run.device": "the CPU", "run.resume": "a folder", "run.overwrite": "a folder",
}  # fmt: skip
"""Key → why no draw sets it."""


def choices() -> dict[str, list[Any]]:
    """Key → the values to draw from."""
    found: dict[str, list[Any]] = {}
    for section, fields in section_fields().items():
        for name, info in fields.items():
            key = f"{section}.{name}"
            if key not in LEFT_OUT:
                values = NUMBERS.get(key) or [value for value in _listed(info.annotation) if value != "nvme"]
                assert values, f"{key} needs values in NUMBERS, or a reason in LEFT_OUT"
                found[key] = values
    return found


def _listed(kind: Any) -> list[Any]:
    """The values of a type that lists them: bool, Literal, and unions of these with None."""
    if kind is bool:
        return [True, False]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return [value for part in get_args(kind) if part is not type(None) for value in _listed(part)]
    return []


def draw(draws: random.Random, number: int) -> dict[str, Any]:
    """Values of `number` keys."""
    options = choices()
    keys = draws.sample(sorted(options), number)
    return {key: draws.choice(options[key]) for key in keys}
