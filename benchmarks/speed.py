"""Predicted beside measured tokens/s, where a GPU's are known: `python -m benchmarks.speed` predicts them anew.

Two settings were measured on an H200 (`python -m benchmarks gpu --part mfu`); torchtitan published the others.
"""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from .common import RESULTS, publish
from .gpu.mfu import LLAMA_8B, MODELS, overrides
from .options import options

TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
EIGHT_B = [
    "task.name=hf_causal_lm", "model.hf=" + json.dumps(LLAMA_8B), "parallel.strategy=fsdp", "precision.mode=bf16",
    "activation.policy=selective_op", "train.seq_len=8192", "train.micro_batch_size=2", "model.loss_chunk_size=0",
]  # fmt: skip
PUBLISHED = {8: 5762, 128: 5605}
"""torchtitan's tokens/s per card of Llama 3.1 8B under FSDP without compilation, by number of H100s."""


def predicted(settings: list[str], gpu: str, cards: int) -> float:
    """tokens/s per card, from the table of cards: no calibration of this machine enters."""
    from shardkit.config.load import load_config
    from shardkit.hardware.cards import GPUS
    from shardkit.plan.client import Planner
    from shardkit.plan.target import Target

    with Planner(Target(cards, GPUS[gpu], min(cards, 8))) as planner:
        time = planner.predict(load_config(None, settings).config, timed=True).time
    assert time is not None
    return time.tokens_per_s / cards


def rows() -> list[dict[str, Any]]:
    measured = json.loads((RESULTS / "gpu_mfu.json").read_text())["cases"]
    table = []
    for name in ("llama-1b", "1.3b"):
        figures = measured[name]["measured"]
        table.append({
            "setting": name, "gpu": "h200", "cards": 1, "source": "gpu_mfu.json",
            "url": "../benchmarks/results/gpu_mfu.json",
            "measured": figures["tokens_per_step"] / median(figures["step_s"]["shardkit"]),
            "predicted": predicted(overrides(MODELS[name]), "h200", 1),
        })  # fmt: skip
    for cards, published in PUBLISHED.items():
        table.append({
            "setting": "Llama 3.1 8B, FSDP, 2 × 8,192, selective_op", "gpu": "h100", "cards": cards,
            "source": "torchtitan", "url": TORCHTITAN, "measured": published,
            "predicted": predicted(EIGHT_B, "h100", cards),
        })  # fmt: skip
    return table


def main() -> None:
    options(__doc__)
    publish("speed", {"rows": rows()})


if __name__ == "__main__":
    main()
