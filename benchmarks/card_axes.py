"""Plans of runs that share layers, sequences or experts, beside real ranks on emulated cards over NCCL.

`python -m benchmarks.card_axes` runs in the environment of `make test-cuda`; tests/cuda/test_axes.py has these cases.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from shardkit.config.load import load_config
from shardkit.hardware.cards import GPUS
from shardkit.plan.client import Planner
from shardkit.plan.search.trial import run_trial
from shardkit.plan.target import choose_target
from tests.emulated_cuda import emulated_card

from .common import earlier, stamp, write_result
from .longest import FULL, KEPT, hf
from .options import ONLY, chosen, options

REFERENCE = [
    f"model.{size}" for size in ("d_model=256", "n_layers=3", "n_heads=8", "vocab_size=1024", "max_seq_len=1024")
]
TP, CP, FP32 = "parallel.tp=2", "parallel.cp=2", "precision.mode=fp32"
FSDP, REPLICAS = "parallel.strategy=fsdp", ["parallel.strategy=hsdp", "parallel.dp_shard=1"]
CASES: dict[str, tuple[int, list[str]]] = {
    "reference, tp2, fp32": (2, [*REFERENCE, FSDP, TP, FP32]),
    "reference, tp2 x fsdp2, blocks again": (4, [*REFERENCE, FSDP, TP, FULL]),
    "reference, tp2 x cp2, accumulated": (4, [*REFERENCE, FSDP, TP, CP, "train.grad_accum_steps=2"]),
    "reference, tp2 x replicas": (4, [*REFERENCE, *REPLICAS, TP]),
    "reference, cp2 x zero2": (2, [*REFERENCE, "parallel.strategy=zero2", CP]),
    "llama with 2 key heads, tp2 x fsdp2, attention kept": (4, [*hf("llama"), FSDP, TP, KEPT]),
    "qwen 3, tp4": (4, [*hf("qwen3", num_key_value_heads=4, head_dim=32), FSDP, "parallel.tp=4"]),
    "qwen 3, tp2 x cp2, blocks again": (4, [*hf("qwen3", num_key_value_heads=4, head_dim=32), FSDP, TP, CP, FULL]),
    "gemma 3, tied and with a window, tp2": (2, [*hf("gemma3_text", head_dim=32, sliding_window=256), FSDP, TP, FULL]),
    "mixtral, ep2 x fsdp2, fp32": (4, [*hf("mixtral", num_local_experts=4), FSDP, "parallel.ep=2", FP32]),
    "mixtral, ep4, uneven, blocks again": (
        4, [*hf("mixtral", num_local_experts=8), FSDP, "parallel.ep=4", "parallel.ep_imbalance=2.5", FULL]
    ),
    "llama, cp2 x fsdp2, fp32": (4, [*hf("llama"), FSDP, CP, FP32]),
}  # fmt: skip
"""Name → (ranks, overrides)."""


def measure(name: str) -> dict[str, Any]:
    """The plan of a case, and what the rank with most took in three steps; in bytes."""
    ranks, given = CASES[name]
    given = [*given, "train.micro_batch_size=2", "train.seq_len=1024"]
    config = load_config(None, given).config
    with (
        patch.dict(os.environ, {"EMUCUDA": "0"}),  # of the planner's own process
        Planner(choose_target(config, ranks, gpu="h100", expandable=True)) as planner,
    ):
        peak = planner.predict(config).peak
    with TemporaryDirectory() as folder, patch.dict(os.environ, emulated_card(GPUS["h100"])):
        ran = run_trial(None, given, ranks, Path(folder, "run"), steps=3)
    return {
        "ranks": ranks, "outcome": ran.outcome, "message": ran.message,
        "planned": {"allocated": peak.allocated, "reserved": peak.reserved},
        "took": {"allocated": ran.peak, "reserved": ran.reserved}, "measured": stamp(),
    }  # fmt: skip


def main() -> None:
    for name in chosen(CASES, options(__doc__, only=ONLY).only):
        case = measure(name)
        print(name, case, flush=True)
        write_result("card_axes", {"cases": {**earlier("card_axes").get("cases", {}), name: case}})


if __name__ == "__main__":
    main()
