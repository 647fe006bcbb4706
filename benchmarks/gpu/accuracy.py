"""Predicted against measured peaks at world size 1: model × precision × checkpointing × strategy.

Allocated and reserved are the allocator's. *Required* cannot be read from it: instead, the same run must work again
with only 2 % more memory than the predicted required bytes, and run out of memory with 5 % less.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from ..models import llama
from .cases import Case, Cases, Figures, Where
from .target import load, planned, predicted, target, train, went

TIGHT = {"required": 1.02, "too little": 0.95}
"""Names of a setting's cases in a limited memory → the share of the required bytes that they get."""
_TEXT = ("train.micro_batch_size=8", "train.seq_len=1024")
_LLAMA = llama(1536, 4096, depth=16, heads=24, kv_heads=8, vocab=32000, positions=2048, model_type="llama")
_CAUSAL = "task.name=hf_causal_lm"
_QLORA = (_CAUSAL, "model.hf=" + json.dumps(_LLAMA), *_TEXT, "adapter.type=lora", "adapter.r=16")
MODELS: dict[str, tuple[str, ...]] = {
    "debug": ("model.preset=debug", "train.micro_batch_size=2"),
    "355m": ("model.preset=355m", *_TEXT),
    "llama-debug": (_CAUSAL, "model.preset=llama-debug", "train.micro_batch_size=2"),
    "llama-0.5b": (_CAUSAL, "model.hf=" + json.dumps(_LLAMA), *_TEXT),
    "gpt2": (_CAUSAL, "model.preset=gpt2", *_TEXT),
    "bert-large": (
        "task.name=hf_masked_lm", "model.preset=bert-large", "train.micro_batch_size=16", "train.seq_len=512",
    ),
    "vit-l": ("task.name=image_classification", "model.preset=vit-l", "train.micro_batch_size=32"),
    "swin2sr": ("task.name=super_resolution", "model.preset=swin2sr", "train.micro_batch_size=4"),
    "qlora": (*_QLORA, "model.quantize={bits: 4}"),
    "qlora double": (*_QLORA, "model.quantize={bits: 4, double: true}"),
}  # fmt: skip
TINY = {"355m": "debug", "llama-0.5b": "llama-debug"}
"""The models of a dry run in place of those named."""
_OPTIMIZER, _PARAMETERS = "parallel.offload_optimizer=cpu", "parallel.offload_param=cpu"
STRATEGIES: dict[str, tuple[str, ...]] = {
    **{name: (f"parallel.strategy={name}",) for name in ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")},
    "zero2 + offload": ("parallel.strategy=zero2", _OPTIMIZER),
    "zero3 + offload": ("parallel.strategy=zero3", _OPTIMIZER, _PARAMETERS),
}
DRY_SETTINGS = ("355m, single, fp32, none", "llama-0.5b, zero2, bf16, full")


def named_settings(dry: bool) -> dict[str, list[str]]:
    """Name of a setting (model, strategy, precision, policy) → its overrides.

    The most different stand first: an interrupted run has seen something of everything.
    """
    names = DRY_SETTINGS if dry else Path(__file__).with_name("accuracy.txt").read_text().splitlines()
    settings = {}
    for name in names:
        model, strategy, precision, policy = name.split(", ")
        sizes = MODELS[TINY.get(model, model) if dry else model]
        settings[name] = [
            *sizes, *STRATEGIES[strategy], f"precision.mode={precision}", f"activation.policy={policy}"
        ]  # fmt: skip
    return settings


def cases(dry: bool) -> Cases:
    """Each setting; then each again in only as much memory as its prediction requires, and in less."""
    settings = named_settings(dry)
    cases: Cases = {
        name: Case(partial(_measure, overrides), partial(_predict, overrides)) for name, overrides in settings.items()
    }
    for kind, share in TIGHT.items():
        for name in list(settings)[:1] if dry else settings:
            cases[f"{name}: {kind}"] = Case(partial(_in_little, settings[name], share), predicted_as=name)
    return cases


def _predict(overrides: list[str], where: Where) -> Figures:
    return predicted(planned(load(where, overrides)([]), target(where)))


def _measure(overrides: list[str], where: Where) -> Figures:
    return went(train(where, overrides, steps=3))


def _in_little(overrides: list[str], share: float, where: Where) -> Figures:
    if "required" not in where.predicted:
        return {"outcome": "failed", "message": "its prediction failed"}
    cap = round(where.predicted["required"] * share)
    return {**went(train(where, overrides, f"{cap / 2**10:.0f}KiB", steps=3)), "cap": cap}
