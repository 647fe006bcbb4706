"""The longest planned sequence on emulated cards: it trains, and one 5 % longer runs out of memory.

`python -m benchmarks.longest` runs in the environment of `make test-cuda`. The planner finds the longest sequence that
fits on small H100s; real ranks then train it, and one that is 5 % longer, on cards of that size that compute nothing.
The emulated NCCL takes no memory: a context as large as all that the plan leaves to CUDA and NCCL stands for it.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.hardware.cards import GPUS
from shardkit.plan.client import Planner
from shardkit.plan.search.ladder import Size, largest, lengths
from shardkit.plan.search.trial import run_trial
from shardkit.plan.target import choose_target
from tests.emulated_cuda import emulated_card

from .common import measure_each, stamp
from .models import llama
from .options import ONLY, chosen, options

LONGER = 1.05
_REFERENCE = [f"model.{size}" for size in ("d_model=256", "n_layers=2", "n_heads=8", "vocab_size=1024")]
_LLAMA = llama(256, 512, depth=2, heads=8, kv_heads=2, vocab=1024, positions=1024)


def hf(model_type: str, **keys: Any) -> list[str]:
    return ["task.name=hf_causal_lm", "model.hf=" + json.dumps({"model_type": model_type, **_LLAMA, **keys})]


FULL, KEPT = "activation.policy=full", "activation.policy=selective_op"
CASES: dict[str, tuple[int, int, list[str]]] = {
    "reference, fsdp": (2, 2, [*_REFERENCE, "parallel.strategy=fsdp", FULL]),
    "reference, zero3": (2, 2, [*_REFERENCE, "parallel.strategy=zero3", FULL]),
    "reference, ddp, nothing recomputed": (4, 4, [*_REFERENCE, "parallel.strategy=ddp"]),
    "llama with 2 key heads, fsdp, attention kept": (4, 4, [*hf("llama"), "parallel.strategy=fsdp", KEPT]),
    "gemma 3 with a window, fsdp": (2, 2, [
        *hf("gemma3_text", head_dim=32, sliding_window=1024), "parallel.strategy=fsdp", FULL]),
    "llama with LoRA, zero2": (2, 2, [*hf("llama"), "parallel.strategy=zero2", "adapter.type=lora", FULL]),
    "reference, hsdp, fp32": (4, 2, [
        *_REFERENCE, "parallel.strategy=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2", FULL,
        "precision.mode=fp32"]),
}  # fmt: skip
"""Name → (ranks, ranks that share a sequence, overrides)."""
MEMORY_GIB = 3
BETWEEN = (4096, 262_144)
"""Lengths that are tried, which spares predictions of models that nobody would train on such a card."""


def settings(name: str, length: int | None = None) -> list[str]:
    """The overrides of a case, at a length."""
    _, cp, given = CASES[name]
    given = [*given, f"parallel.cp={cp}", "train.micro_batch_size=1"]
    return given if length is None else [*given, *_size(load(given), length).settings]


def load(overrides: list[str]) -> RunConfig:
    return load_config(None, overrides).config


def _size(config: RunConfig, length: int) -> Size:
    """The shortest of the search's lengths that is at least so long."""
    return next(size for size in lengths(config) if size.amount >= length)


def planned(name: str) -> dict[str, int]:
    """The longest sequence that fits, and what the plan says of it; in bytes."""
    given = settings(name)
    start = load(given)
    target = choose_target(start, CASES[name][0], gpu="h100", gpu_memory=f"{MEMORY_GIB}GiB")
    sizes = [size for size in lengths(start) if BETWEEN[0] <= size.amount <= BETWEEN[1]]
    longest = largest(lambda extra: load([*given, *extra]), sizes, target, None).largest
    with Planner(target) as planner:
        plan = planner.predict(load([*given, *longest.settings]))
    return {
        "length": longest.amount, "longer": _size(start, round(longest.amount * LONGER)).amount, "needed": plan.needed,
        "allocated": plan.peak.allocated, "reserved": plan.peak.reserved, "overhead": plan.overhead,
    }  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """The plan of a case, and what real ranks did with both lengths."""
    with patch.dict(os.environ, {"EMUCUDA": "0"}):  # of the planner's own process
        plan = planned(name)
    ranks, cp, _ = CASES[name]
    card = replace(GPUS["h100"], memory=MEMORY_GIB << 30, context=plan["overhead"])

    def tried(length: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, emulated_card(card)):
            ran = run_trial(None, settings(name, length), ranks, Path(folder), steps=3)
        return {"outcome": ran.outcome, "peak": ran.peak, "reserved": ran.reserved, "message": ran.message}

    found = {"measured": stamp(), "ranks": ranks, "cp": cp, "planned": plan}
    found |= {which: tried(plan[which]) for which in ("length", "longer")}
    if found["length"]["outcome"] != "ok":
        shorter = [size.amount for size in lengths(load(settings(name))) if size.amount < plan["length"]]
        found["shorter"] = {"length": shorter[-1], **tried(shorter[-1])}
    return found


if __name__ == "__main__":
    args = options(__doc__, only=ONLY)
    measure_each("longest", "cases", chosen(CASES, args.only), measure, memory_gib=MEMORY_GIB)
