"""Predicted against measured peaks of several ranks, at full size, on emulated cards of one machine.

The list stands here before anything is measured, and every case stays in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardkit.hardware.cards import GPUS

from .accuracy import DRY_MODELS, MODELS, TIGHT
from .cases import Case, Cases, Found, Where
from .child import emulated_card
from .mfu import MODELS as LARGE
from .target import load, planned, predicted, train, went, went_traced

if TYPE_CHECKING:
    from shardkit.plan.search.trial import Trial
    from shardkit.plan.target import Target

_MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
_SIZES: dict[str, tuple[str, ...]] = {
    **MODELS,
    "debug": DRY_MODELS["355m"],
    "1.3b": ("model.preset=1.3b", "train.micro_batch_size=8", "train.seq_len=1024"),
    "13b": ("model.preset=13b", "train.micro_batch_size=1", "train.seq_len=2048"),
    "llama-8b": (*LARGE["llama-8b"].overrides, "train.micro_batch_size=1", "train.seq_len=2048"),
    "mixtral": (
        "task.name=hf_causal_lm", "model.hf=" + json.dumps(_MIXTRAL), "train.micro_batch_size=4", "train.seq_len=1024",
    ),
}  # fmt: skip
_STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "fsdp kept": ("parallel.strategy=fsdp", "parallel.reshard_after_forward=false"),
    "fsdp + offload": ("parallel.strategy=fsdp", "parallel.offload_param=cpu"),
    "hsdp": ("parallel.strategy=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
    "zero1": ("parallel.strategy=zero1",),
    "zero2": ("parallel.strategy=zero2",),
    "zero3": ("parallel.strategy=zero3",),
    "zero2 + offload": ("parallel.strategy=zero2", "parallel.offload_optimizer=cpu"),
    "zero3 + offload": ("parallel.strategy=zero3", "parallel.offload_optimizer=cpu", "parallel.offload_param=cpu"),
}
_FIXED, _WHOLE_LOSS, _ACCUMULATED = "fixed segments", "whole loss", "3 micro-batches"
"""The allocator without expandable segments; `model.loss_chunk_size=0`; gradient accumulation."""


@dataclass(frozen=True)
class Setting:
    model: str
    ranks: int
    strategy: str
    precision: str
    policy: str
    also: str = ""
    card: str = "h100"

    @property
    def name(self) -> str:
        parts = [self.model, f"{self.ranks} ranks", self.strategy, self.precision, self.policy, self.also]
        return ", ".join(part for part in parts if part)

    @property
    def overrides(self) -> list[str]:
        also = {_WHOLE_LOSS: ("model.loss_chunk_size=0",), _ACCUMULATED: ("train.grad_accum_steps=3",)}
        return [
            *_SIZES[self.model], *_STRATEGIES[self.strategy], f"precision.mode={self.precision}",
            f"activation.policy={self.policy}", *also.get(self.also, ()),
        ]  # fmt: skip


# The most different first: an interrupted run has seen something of everything.
SETTINGS = [
    Setting("355m", 2, "ddp", "bf16", "none"),
    Setting("llama-0.5b", 2, "fsdp", "bf16", "full"),
    Setting("355m", 2, "zero2", "bf16", "selective"),
    Setting("llama-0.5b", 2, "zero3", "bf16", "none"),
    Setting("bert-large", 2, "zero1", "bf16", "full"),
    Setting("vit-l", 2, "fsdp", "bf16", "none"),
    Setting("swin2sr", 2, "ddp", "bf16", "full"),
    Setting("mixtral", 2, "fsdp", "bf16", "none"),
    Setting("355m", 2, "ddp", "bf16", "none", _FIXED),
    Setting("llama-0.5b", 2, "fsdp", "bf16", "none", _WHOLE_LOSS),
    Setting("1.3b", 2, "fsdp", "bf16", "selective_op"),
    Setting("355m", 4, "hsdp", "bf16", "full"),
    Setting("llama-8b", 8, "fsdp", "bf16", "selective_op"),
    Setting("355m", 2, "zero2 + offload", "bf16", "full"),
    Setting("llama-0.5b", 2, "zero3 + offload", "bf16", "full"),
    Setting("llama-0.5b", 2, "fsdp + offload", "bf16", "none"),
    Setting("355m", 2, "ddp", "fp32", "full"),
    Setting("355m", 2, "fsdp", "fp32", "none"),
    Setting("355m", 2, "fsdp kept", "bf16", "none"),
    Setting("355m", 2, "zero1", "bf16", "none"),
    Setting("355m", 2, "zero3", "fp32", "full"),
    Setting("llama-0.5b", 2, "ddp", "bf16", "selective"),
    Setting("llama-0.5b", 2, "zero2", "bf16", "none", _WHOLE_LOSS),
    Setting("llama-0.5b", 2, "fsdp", "bf16", "full", _FIXED),
    Setting("llama-0.5b", 2, "zero2", "bf16", "none", _FIXED),
    Setting("llama-0.5b", 2, "fsdp", "pure_bf16", "none"),
    Setting("gpt2", 2, "fsdp", "bf16", "selective"),
    Setting("gpt2", 2, "zero3", "bf16", "none"),
    Setting("gpt2", 2, "ddp", "fp32", "full"),
    Setting("bert-large", 2, "fsdp", "bf16", "none"),
    Setting("bert-large", 2, "zero2", "bf16", "full", _FIXED),
    Setting("vit-l", 2, "ddp", "bf16", "full"),
    Setting("vit-l", 2, "zero3", "bf16", "full"),
    Setting("swin2sr", 2, "fsdp", "fp32", "none"),
    Setting("swin2sr", 2, "zero2", "bf16", "none"),
    Setting("mixtral", 2, "zero2", "bf16", "full"),
    Setting("mixtral", 2, "zero3", "bf16", "none"),
    Setting("355m", 2, "fsdp", "bf16", "none", _ACCUMULATED),
    Setting("355m", 2, "zero2", "bf16", "none", _ACCUMULATED),
    Setting("1.3b", 2, "zero3", "bf16", "full"),
    Setting("1.3b", 4, "zero2", "bf16", "full"),
    Setting("1.3b", 4, "hsdp", "bf16", "none"),
    Setting("1.3b", 4, "ddp", "bf16", "full"),
    Setting("13b", 8, "fsdp", "bf16", "full"),
    Setting("13b", 8, "zero3", "bf16", "full"),
    Setting("llama-8b", 8, "zero3", "bf16", "full"),
]


DRY_SETTINGS = [Setting("debug", 2, "ddp", "fp32", "none")]


def cases(dry: bool) -> Cases:
    """Each setting; then each in only as much memory as its prediction requires, and in less."""
    settings = DRY_SETTINGS if dry else SETTINGS
    found: Cases = {one.name: Case(partial(_measure, one), partial(_predict, one)) for one in settings}
    for kind, share in TIGHT.items():
        found.update(
            {f"{one.name}: {kind}": Case(partial(_in_little, one, share), predicted_as=one.name) for one in settings}
        )
    return found


def _predict(setting: Setting, where: Where) -> Found:
    return predicted(planned(where, load(where, setting.overrides)([]), _target(setting, where)))


def _target(setting: Setting, where: Where) -> Target:
    from shardkit.plan.target import Target

    expandable = setting.also != _FIXED
    return Target(
        setting.ranks, GPUS[setting.card], setting.ranks, expandable=expandable, host_memory=where.host_memory
    )


def _measure(setting: Setting, where: Where) -> Found:
    return went_traced(_train(setting, where), where.folder / "run")


def _in_little(setting: Setting, share: float, where: Where) -> Found:
    if "required" not in where.predicted:
        return {"outcome": "failed", "message": "its prediction failed"}
    cap = round(where.predicted["required"] * share)
    return {**went(_train(setting, where, f"{cap / 2**10:.0f}KiB")), "cap": cap}


def _train(setting: Setting, where: Where, cap: str | None = None) -> Trial:
    card = emulated_card(GPUS[setting.card], setting.also != _FIXED)
    return train(where, setting.overrides, cap, steps=3, ranks=setting.ranks, card=card, traced=cap is None)
