"""Plans of published trainings on long sequences, beside the published figures.

`python -m benchmarks.long` plans each setting, or the named ones, for H100s; nothing is run. The longest sequence is
that of `shardkit plan --longest`, which looks among lengths near the published one here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from shardkit.config.load import as_override, load_config
from shardkit.config.schema import RunConfig
from shardkit.plan.client import Planner
from shardkit.plan.search.ladder import largest, lengths
from shardkit.plan.target import Target, choose_target

from .common import earlier, write_result
from .models import llama

GIB = 2**30
_LLAMA_8B = {
    "model_type": "llama",
    **llama(4096, 14336, depth=32, heads=32, kv_heads=8, vocab=128256, positions=2**23),
}  # fmt: skip
_QWEN3_8B = {
    "model_type": "qwen3", "head_dim": 128,
    **llama(4096, 12288, depth=36, heads=32, kv_heads=8, vocab=151936, positions=2**20),
}  # fmt: skip
_ALST = {
    "activation.policy": "full", "activation.offload": "cpu", "parallel.strategy": "zero3",
    "parallel.offload_optimizer": "cpu", "model.hf": _LLAMA_8B, "model.mlp_chunks": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ALST, Llama-8B, 1 GPU": {
        "gpus": 1, "published": 80 * GIB, "figure": "fits 80 GiB, 555,000 tokens fail in a kernel",
        "source": "snowflakedb/ArcticTraining, run-h100-sp1-llama-8b.yml",
        "between": (440_000, 480_000),
        "settings": {**_ALST, "parallel.offload_param": "cpu", "train.seq_len": 500_000},
    },
    "ALST, Llama-8B, 8 GPUs": {
        "gpus": 8, "published": 80 * GIB, "figure": "fits 80 GiB",
        "source": "snowflakedb/ArcticTraining, run-h100-sp8-llama-8b.yml",
        "between": (3_280_000, 3_560_000),
        "settings": {**_ALST, "parallel.cp": 8, "train.seq_len": 3_700_000},
    },
    "TRL, Qwen3-8B, 8 GPUs": {
        "gpus": 8, "published": 56.2 * GIB, "figure": "peak",
        "source": "huggingface/trl 6846",
        "settings": {
            "activation.policy": "full", "activation.offload": "cpu", "parallel.strategy": "fsdp", "parallel.cp": 8,
            "model.hf": _QWEN3_8B, "train.seq_len": 1_048_576,
        },
    },
    "torchtitan, Llama-8B, 8 GPUs": {
        "gpus": 8, "published": 84.5 * GIB, "figure": "reserved",
        "source": "pytorch/torchtitan, its published H100 table of December 2024",
        "settings": {
            "activation.policy": "full", "parallel.strategy": "fsdp", "parallel.cp": 8, "model.hf": _LLAMA_8B,
            "model.loss_chunk_size": 0, "train.seq_len": 262_144,
        },
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "task.name": "hf_causal_lm", "train.micro_batch_size": 1, "train.eval_samples": 0, "precision.mode": "bf16",
}  # fmt: skip


def load(name: str, changes: Sequence[str] = ()) -> RunConfig:
    given = [f"{key}={as_override(value)}" for key, value in {**COMMON, **CASES[name]["settings"]}.items()]
    return load_config(None, [*given, *changes]).config


def longest(name: str, target: Target) -> int:
    least, most = CASES[name]["between"]
    sizes = [size for size in lengths(load(name)) if least <= size.amount <= most]
    return largest(partial(load, name), sizes, target, None).largest.amount


def planned(name: str) -> dict[str, Any]:
    case, config = CASES[name], load(name)
    target = choose_target(config, case["gpus"], gpu="h100")
    with Planner(target) as planner:
        estimate = planner.predict(config)
    row = {
        "case": name, "source": case["source"], "tokens": config.train.seq_len, "published": case["published"],
        "figure": case["figure"], "peak": estimate.peak.allocated, "reserved": estimate.peak.reserved,
        "needed": estimate.needed, "module": estimate.peak.module, "phase": estimate.peak.phase,
        "host": estimate.host_peak, "categories": {key: part.device for key, part in estimate.categories.items()},
    }  # fmt: skip
    return row | ({"longest": longest(name, target)} if "between" in case else {})


def main() -> None:
    result = earlier("long")
    known = {row["case"]: row for row in result.get("rows", [])}
    for name in sys.argv[1:] or CASES:
        known[name] = planned(name)
        print(known[name], flush=True)
    write_result("long", {"rows": [known[name] for name in CASES if name in known]})


if __name__ == "__main__":
    main()
