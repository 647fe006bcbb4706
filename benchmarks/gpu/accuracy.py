"""Predicted against measured peaks at world size 1: model × precision × checkpointing × strategy.

Allocated and reserved are the allocator's. *Required* cannot be read from it: instead, the same run must work again
with only 2 % more memory than the predicted required bytes, and run out of memory with 5 % less.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from .cases import Case, Cases, Found, Where
from .target import load, planned, predicted, target, train, went, went_traced

MARGIN, TOO_LITTLE = 1.02, 0.95
TIGHT = {"required": MARGIN, "too little": TOO_LITTLE}
"""Names of a setting's cases in a limited memory → the share of the required bytes that they get."""
_TEXT = ("train.micro_batch_size=8", "train.seq_len=1024")
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
MODELS: dict[str, tuple[str, ...]] = {
    "355m": ("model.preset=355m", *_TEXT),
    "llama-0.5b": ("task.name=hf_causal_lm", "model.hf=" + json.dumps(_LLAMA), *_TEXT),
    "gpt2": ("task.name=hf_causal_lm", "model.preset=gpt2", *_TEXT),
    "bert-large": (
        "task.name=hf_masked_lm",
        "model.preset=bert-large",
        "train.micro_batch_size=16",
        "train.seq_len=512",
    ),
    "vit-l": ("task.name=image_classification", "model.preset=vit-l", "train.micro_batch_size=32"),
    "swin2sr": ("task.name=super_resolution", "model.preset=swin2sr", "train.micro_batch_size=4"),
}
MODELS["qlora"] = (*MODELS["llama-0.5b"], "adapter.type=lora", "adapter.r=16", "model.quantize={bits: 4}")
MODELS["qlora double"] = (*MODELS["qlora"][:-1], "model.quantize={bits: 4, double: true}")
DRY_MODELS: dict[str, tuple[str, ...]] = {
    "355m": ("model.preset=debug", "train.micro_batch_size=2"),
    "llama-0.5b": ("task.name=hf_causal_lm", "model.preset=llama-debug", "train.micro_batch_size=2"),
}
_OFFLOAD = ("parallel.strategy=zero2", "parallel.offload_optimizer=cpu")
_OFFLOAD_ALL = ("parallel.strategy=zero3", "parallel.offload_optimizer=cpu", "parallel.offload_param=cpu")
STRATEGIES = {
    "single": ("parallel.strategy=single",),
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "zero1": ("parallel.strategy=zero1",),
    "zero2": ("parallel.strategy=zero2",),
    "zero3": ("parallel.strategy=zero3",),
    "zero2 + offload": _OFFLOAD,
    "zero3 + offload": _OFFLOAD_ALL,
}
# The most different settings first: an interrupted run has seen something of everything.
SETTINGS = [
    ("355m", "single", "fp32", "none"), ("355m", "single", "bf16", "full"), ("llama-0.5b", "fsdp", "bf16", "none"),
    ("355m", "zero2", "bf16", "selective"), ("355m", "zero3 + offload", "bf16", "full"),
    ("bert-large", "single", "bf16", "none"), ("vit-l", "ddp", "bf16", "none"), ("swin2sr", "single", "bf16", "full"),
    ("llama-0.5b", "zero3", "bf16", "full"), ("gpt2", "single", "fp32", "full"), ("355m", "ddp", "fp32", "none"),
    ("355m", "fsdp", "bf16", "full"), ("355m", "zero1", "bf16", "none"), ("355m", "zero2 + offload", "bf16", "full"),
    ("llama-0.5b", "single", "bf16", "selective"), ("llama-0.5b", "single", "pure_bf16", "none"),
    ("gpt2", "fsdp", "bf16", "selective"), ("355m", "single", "fp16", "none"), ("vit-l", "single", "bf16", "full"),
    ("bert-large", "zero2", "bf16", "full"), ("llama-0.5b", "zero2 + offload", "bf16", "none"),
    ("355m", "single", "bf16", "selective_op"), ("355m", "zero3", "fp32", "none"),
    ("swin2sr", "single", "fp32", "none"),
    ("qlora", "single", "bf16", "none"), ("qlora double", "fsdp", "bf16", "full"), ("qlora", "zero2", "bf16", "full"),
    ("qlora", "ddp", "bf16", "selective"), ("qlora double", "single", "bf16", "full"),
    ("qlora", "fsdp", "bf16", "none"), ("qlora double", "zero1", "bf16", "full"), ("qlora", "single", "fp32", "full"),
]  # fmt: skip
DRY_SETTINGS = [("355m", "single", "fp32", "none"), ("llama-0.5b", "zero2", "bf16", "full")]


def named_settings(dry: bool) -> dict[str, list[str]]:
    """Name of a setting → its overrides."""
    models = DRY_MODELS if dry else MODELS
    return {
        f"{model}, {strategy}, {precision}, {policy}": [
            *models[model], *STRATEGIES[strategy], f"precision.mode={precision}", f"activation.policy={policy}"
        ]
        for model, strategy, precision, policy in (DRY_SETTINGS if dry else SETTINGS)
    }  # fmt: skip


def cases(dry: bool) -> Cases:
    """Each setting; then each in only as much memory as its prediction requires, and in less."""
    chosen = named_settings(dry)
    found: Cases = {
        name: Case(partial(_measure, overrides), partial(_predict, overrides)) for name, overrides in chosen.items()
    }
    for kind, share in TIGHT.items():
        for name, overrides in list(chosen.items())[: 1 if dry else None]:
            found[f"{name}: {kind}"] = Case(partial(_in_little, overrides, share), predicted_as=name)
    return found


def _predict(overrides: Sequence[str], where: Where) -> Found:
    return predicted(planned(where, load(where, overrides)([]), target(where)))


def _measure(overrides: Sequence[str], where: Where) -> Found:
    return went_traced(train(where, overrides, steps=3), where.folder / "run")


def _in_little(overrides: Sequence[str], share: float, where: Where) -> Found:
    if "required" not in where.predicted:
        return {"outcome": "failed", "message": "its prediction failed"}
    cap = round(where.predicted["required"] * share)
    return {**went(train(where, overrides, f"{cap / 2**10:.0f}KiB", steps=3, traced=False)), "cap": cap}
