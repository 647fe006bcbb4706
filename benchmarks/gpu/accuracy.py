"""Predicted against measured peaks at world size 1: model × precision × checkpointing × strategy.

Allocated and reserved are the allocator's. *Required* cannot be read from it: instead, the same run must work again
with only 2 % more memory than the predicted required bytes, and run out of memory with 5 % less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.hardware.cards import GPUS

from ..models import llama
from .cases import Case, Cases, Figures, Where
from .child import emulated_card
from .mfu import MODELS as LARGE
from .target import load, planned, predicted, target, train, went, went_traced

if TYPE_CHECKING:
    from shardkit.plan.search.trial import Trial
    from shardkit.plan.target import Target

TIGHT = {"required": 1.02, "too little": 0.95}
"""Names of a setting's cases in a limited memory → the share of the required bytes that they get."""
_TEXT = ("train.micro_batch_size=8", "train.seq_len=1024")
_LLAMA = llama(1536, 4096, depth=16, heads=24, kv_heads=8, vocab=32000, positions=2048, model_type="llama")
_MIXTRAL = llama(
    1024, 3584, depth=8, heads=16, kv_heads=4, vocab=32000, positions=2048, model_type="mixtral", num_local_experts=8,
    num_experts_per_tok=2,
)  # fmt: skip
_CAUSAL = "task.name=hf_causal_lm"
_QLORA = (_CAUSAL, "model.hf=" + json.dumps(_LLAMA), *_TEXT, "adapter.type=lora", "adapter.r=16")
MODELS: dict[str, tuple[str, ...]] = {
    "debug": ("model.preset=debug", "train.micro_batch_size=2"),
    "355m": ("model.preset=355m", *_TEXT),
    "1.3b": ("model.preset=1.3b", *_TEXT),
    "13b": ("model.preset=13b", "train.micro_batch_size=1", "train.seq_len=2048"),
    "llama-debug": (_CAUSAL, "model.preset=llama-debug", "train.micro_batch_size=2"),
    "llama-0.5b": (_CAUSAL, "model.hf=" + json.dumps(_LLAMA), *_TEXT),
    "llama-8b": (*LARGE["llama-8b"].overrides, "train.micro_batch_size=1", "train.seq_len=2048"),
    "mixtral": (_CAUSAL, "model.hf=" + json.dumps(_MIXTRAL), "train.micro_batch_size=4", "train.seq_len=1024"),
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
    "fsdp kept": ("parallel.strategy=fsdp", "parallel.reshard_after_forward=false"),
    "fsdp + offload": ("parallel.strategy=fsdp", _PARAMETERS),
    "hsdp": ("parallel.strategy=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
    "zero2 + offload": ("parallel.strategy=zero2", _OPTIMIZER),
    "zero3 + offload": ("parallel.strategy=zero3", _OPTIMIZER, _PARAMETERS),
}
_FIXED = "fixed segments"
ALSO = {_FIXED: (), "whole loss": ("model.loss_chunk_size=0",), "3 micro-batches": ("train.grad_accum_steps=3",)}
"""The allocator without expandable segments; logits of all tokens at once; gradient accumulation."""
DRY_SETTINGS = ("355m, single, fp32, none", "llama-0.5b, zero2, bf16, full")
CARD = "h100"
"""The card of settings of several ranks."""


@dataclass(frozen=True)
class Setting:
    """A setting by its name: model, ranks if there are several, strategy, precision, policy, and what is in `ALSO`."""

    name: str
    dry: bool = False

    @property
    def ranks(self) -> int:
        words = self.name.split(", ")[1].split(" ")
        return int(words[0]) if words[1:] == ["ranks"] else 1

    @property
    def is_fixed(self) -> bool:
        return self.name.endswith(f", {_FIXED}")

    @property
    def overrides(self) -> list[str]:
        model, *_ = words = self.name.split(", ")
        strategy, precision, policy, *also = words[1 if self.ranks == 1 else 2 :]
        return [
            *MODELS[TINY.get(model, model) if self.dry else model], *STRATEGIES[strategy],
            f"precision.mode={precision}", f"activation.policy={policy}", *(ALSO[also[0]] if also else ()),
        ]  # fmt: skip

    def target(self, where: Where) -> Target:
        from shardkit.plan.target import Target

        if self.ranks == 1:
            return target(where)
        host = where.host_memory
        return Target(self.ranks, GPUS[CARD], self.ranks, expandable=not self.is_fixed, host_memory=host)

    def train(self, where: Where, cap: str | None = None) -> Trial:
        card = None if self.ranks == 1 else emulated_card(GPUS[CARD], expandable=not self.is_fixed)
        return train(where, self.overrides, cap, steps=3, ranks=self.ranks, card=card, traced=cap is None)


def listed(part: str) -> list[str]:
    """The settings of a part. The most different stand first: an interrupted run has seen something of everything."""
    return Path(__file__).with_name(f"{part}.txt").read_text().splitlines()


def named_settings(dry: bool) -> dict[str, list[str]]:
    """Name of a setting → its overrides."""
    return {name: Setting(name, dry).overrides for name in (DRY_SETTINGS if dry else listed("accuracy"))}


def cases(dry: bool) -> Cases:
    names = list(named_settings(dry))
    return cases_of([Setting(name, dry) for name in names], names[:1] if dry else names)


def cases_of(settings: Iterable[Setting], tight: Iterable[str]) -> Cases:
    """Each setting; then those in `tight` in only as much memory as their predictions require, and in less."""
    each = {setting.name: setting for setting in settings}
    cases: Cases = {
        name: Case(partial(_measure, setting), partial(_predict, setting)) for name, setting in each.items()
    }
    for kind, share in TIGHT.items():
        for name in tight:
            cases[f"{name}: {kind}"] = Case(partial(_in_little, each[name], share), predicted_as=name)
    return cases


def _predict(setting: Setting, where: Where) -> Figures:
    return predicted(planned(where, load(where, setting.overrides)([]), setting.target(where)))


def _measure(setting: Setting, where: Where) -> Figures:
    return went_traced(setting.train(where), where.folder / "run")


def _in_little(setting: Setting, share: float, where: Where) -> Figures:
    if "required" not in where.predicted:
        return {"outcome": "failed", "message": "its prediction failed"}
    cap = round(where.predicted["required"] * share)
    return {**went(setting.train(where, f"{cap / 2**10:.0f}KiB")), "cap": cap}
