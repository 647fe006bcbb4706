"""Runs whose sequences are split over ranks, and the same runs with whole sequences: losses, norms and weights."""

from __future__ import annotations

import gc
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.data.chats import write_lines, write_tokenizer
from tests.strategies.cases import PARTITION_ALL

GLOBAL_BATCH, ACCUM, STEPS, SEQ = 16, 2, 4, 24
REFERENCE: dict[str, Any] = {
    "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 4, "model.vocab_size": 512, "model.max_seq_len": 64,
}  # fmt: skip
PADDED: dict[str, Any] = {}
PACKED = {"data.packing": "packed"}
PADDING_FREE = {"data.packing": "padding_free"}
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip


def hf(model_type: str, **keys: Any) -> dict[str, Any]:
    return {"task.name": "hf_causal_lm", "model.hf": {"model_type": model_type, **_LLAMA, **keys}}


MODELS = {
    "reference": REFERENCE,
    "tied": {**REFERENCE, "model.tie_weights": True, "model.loss_chunk_size": 8},
    "llama": hf("llama"),
    "one key head": hf("llama", num_key_value_heads=1),
    "qwen3": hf("qwen3", head_dim=8),
    "mistral with a window": hf("mistral", sliding_window=5),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # The step is the gradient: a wrong factor, which AdamW would hide, shows in the weights.
    "sgd": {"optim.name": "sgd", "optim.lr": 0.3, "optim.weight_decay": 0.0, "train.max_norm": None},
    "adamw": {"optim.name": "adamw", "optim.lr": 3e-3, "train.max_norm": 0.5},
}


def documents(folder: Path, pairs: bool) -> dict[str, Any]:
    """Texts of 2 to some 40 tokens, which straddle every cut."""
    drawn = random.Random(1)
    words = ["def", "return x", "0", "import", "while"]
    texts = [" ".join(drawn.choices(words, k=drawn.randint(1, 12))) for _ in range(300)]
    rows = [
        {"prompt": text[: len(text) // 2], "completion": text[len(text) // 2 :]} if pairs else {"text": text}
        for text in texts
    ]
    write_lines(folder / "texts.jsonl", rows)
    tokenizer = write_tokenizer(folder / "tokenizer", template=None)
    return {"data.path": str(folder / "texts.jsonl"), "data.tokenizer": str(tokenizer), "data.cache_dir": str(folder)}


def run(settings: dict[str, Any]) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train by `settings` in this rank's world; (loss, norm) of each step, and on rank 0 the weights after them."""
    world, cp = dist.get_world_size(), settings.get("parallel.cp", 1)
    data_ranks = world // cp
    with tempfile.TemporaryDirectory() as folder:
        full = {
            "run.dir": f"{folder}/run", "run.device": "cpu", "run.overwrite": True, "train.max_steps": STEPS,
            "train.seq_len": SEQ, "train.grad_accum_steps": ACCUM, "optim.schedule": "constant",
            "train.micro_batch_size": GLOBAL_BATCH // ACCUM // data_ranks, "train.eval_samples": 8, "checkpoint.every_steps": None,
            **documents(Path(folder), settings.get("data.packing") is None), **settings,
        }  # fmt: skip
        folders: list[Any] = [full]
        dist.broadcast_object_list(folders)
        full = folders[0]
        if full.get("parallel.strategy") == "zero3":
            full["parallel.ds_config"] = PARTITION_ALL
        with start(None, full) as job:
            trainer = Trainer(job)
            curve = [(record["loss"], record["grad_norm"]) for record in trainer.steps()]
            weights = whole_weights(job.strategy)
        gc.collect()
        dist.barrier()
    return curve, weights


def whole_weights(strategy: Any) -> dict[str, torch.Tensor]:
    pieces: list[Any] = [None] * dist.get_world_size()
    mine = [
        (s.name, s.shape, s.start, s.local.detach().clone()) for s in strategy.shards() if s.name.startswith("model.")
    ]
    dist.all_gather_object(pieces, mine)
    out: dict[str, torch.Tensor] = {}
    for name, shape, start_at, local in (piece for rank in pieces for piece in rank):
        flat = out.setdefault(name, torch.full(shape, float("nan")).view(-1))
        flat[start_at : start_at + local.numel()] = local.float()
    return out


def runs(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: run(settings) for name, settings in cases.items()}


def distance(left: Any, right: Any) -> tuple[float, float, float]:
    """Largest differences of two runs: loss, norm (relative), weights (relative to a weight's largest element)."""
    losses = max(abs(a[0] - b[0]) for a, b in zip(left[0], right[0], strict=True))
    norms = max(abs(a[1] - b[1]) / b[1] for a, b in zip(left[0], right[0], strict=True))
    assert left[1].keys() == right[1].keys()
    weights = max(
        float((left[1][name] - value).abs().max() / value.abs().max().clamp_min(1e-3))
        for name, value in right[1].items()
    )
    return losses, norms, weights
