"""Tokens/s and model FLOPs utilisation through shardkit, against the same model in a bare hand-tuned loop.

Both arms take turns in one process, so that heat and clocks are the same for both. The card's ceiling is measured too:
the best of a sweep of bf16 products of random matrices.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..models import llama
from .cases import Case, Cases, Figures, Where

GOALS = {"over_bare": 0.99, "mfu": 0.5}
CEILING = "bf16 matmul"


@dataclass(frozen=True)
class Model:
    """The model that both arms train.

    Attributes:
        turns, steps: each arm takes `steps` steps in each of its turns, which are timed as one.
    """

    overrides: tuple[str, ...]
    seq: int
    micro: int
    accum: int = 1
    precision: str = "bf16"
    turns: int = 8
    steps: int = 4


# Sizes of Llama 3.2 1B and Llama 3.1 8B (Grattafiori et al. 2024, table 3, and the published configs).
_ALIKE: dict[str, Any] = {"kv_heads": 8, "vocab": 128256, "positions": 8192, "model_type": "llama"}
LLAMA_1B = llama(2048, 8192, depth=16, heads=32, head_dim=64, tie_word_embeddings=True, **_ALIKE)
LLAMA_8B = llama(4096, 14336, depth=32, heads=32, **_ALIKE)
MODELS = {
    "1.3b": Model(("model.preset=1.3b",), seq=1024, micro=16),
    "llama-1b": Model(
        ("task.name=hf_causal_lm", "model.hf=" + json.dumps(LLAMA_1B)), seq=2048, micro=8
    ),
    # fp32 masters of two arms would not fit on one card: weights, gradients and moments are bf16.
    "llama-8b": Model(
        ("task.name=hf_causal_lm", "model.hf=" + json.dumps(LLAMA_8B)), seq=2048, micro=1, accum=8,
        precision="pure_bf16", turns=6, steps=2,
    ),
}  # fmt: skip
_DRY_LLAMA = ("task.name=hf_causal_lm", "model.preset=llama-debug")
DRY_MODELS = {
    "1.3b": Model(("model.preset=debug", "model.n_layers=2"), seq=64, micro=2, turns=2, steps=2),
    "llama-8b": Model(_DRY_LLAMA, seq=64, micro=1, accum=2, precision="pure_bf16", turns=2, steps=2),
}
SWEEP = [(4096,) * 3, (8192,) * 3, (16384,) * 3, (8192, 4096, 14336), (16384, 8192, 2048), (16384, 8192, 8192)]
DRY_SWEEP = [(256,) * 3, (512,) * 3]


def cases(dry: bool) -> Cases:
    named: Cases = {CEILING: Case(ceiling)}
    for name, model in (DRY_MODELS if dry else MODELS).items():
        named[name] = Case(partial(measure, model))
    return named


def ceiling(where: Where) -> Figures:
    """FLOP/s of [m, k] × [k, n] products in bf16 of normal random values: ten samples per size, best median."""
    import torch

    from shardkit.hardware.measure import timed

    device = torch.device("cpu" if where.dry else "cuda")
    figures: Figures = {"sizes": []}
    for m, n, k in DRY_SWEEP if where.dry else SWEEP:
        a, b = (torch.randn(*shape, device=device).bfloat16() for shape in ((m, k), (k, n)))
        product = partial(torch.matmul, a, b)
        for _ in range(3):
            timed(device, product)
        samples = [2 * m * n * k / timed(device, product) for _ in range(10)]
        figures["sizes"].append({"m": m, "n": n, "k": k, "flops": sorted(samples)})
    best = max(sorted(size["flops"])[len(size["flops"]) // 2] for size in figures["sizes"])
    return {**figures, "outcome": "ok", "best_flops": best}


def overrides(model: Model) -> list[str]:
    """shardkit's settings, except for the device."""
    return [
        *model.overrides, "parallel.strategy=single", f"precision.mode={model.precision}", "compile.enabled=true",
        "activation.policy=selective", "model.loss_chunk_size=1024", f"train.seq_len={model.seq}",
        f"train.micro_batch_size={model.micro}", f"train.grad_accum_steps={model.accum}",
    ]  # fmt: skip


def measure(model: Model, where: Where) -> Figures:
    from shardkit.errors import OutOfMemoryError
    from shardkit.launch.ranks.env import grow_segments

    grow_segments(os.environ)  # as `shardkit.train` does, before torch is imported
    from .mfu_arms import in_turns

    try:
        return {"outcome": "ok", **in_turns(model, where)}
    except OutOfMemoryError as error:  # torch's error, explained by the job that both arms run in
        return {"outcome": "out of memory", "message": error.cause}
