"""Plans of wide models, layout by layout: what sharding, split experts and shared layers take.

`python -m benchmarks.wide_plans` plans each setting; nothing is run or downloaded. With `--rehearse`, in an environment
with the CUDA build of torch, one live rank of each trains, with all layers, among pretended ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.plan.client import Planner
from shardkit.plan.target import choose_target

from .common import REPO, earlier, environ, environment, stamp, write_result
from .models import llama
from .options import ONLY, Option, chosen, options

_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": False,
    **llama(2048, 6144, depth=48, heads=32, kv_heads=4, vocab=151936, positions=40960),
}  # fmt: skip
_GLM_106B_A12B = {
    "model_type": "glm4_moe", "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    **llama(4096, 10944, depth=46, heads=96, kv_heads=8, vocab=151552, positions=131072),
}  # fmt: skip
_LLAMA_70B = {
    "model_type": "llama",
    **llama(8192, 28672, depth=80, heads=64, kv_heads=8, vocab=128256, positions=131072),
}  # fmt: skip
_LORA = {
    "model": _GLM_106B_A12B, "adapter.type": "lora", "adapter.r": 16,
    "adapter.targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3-30B-A3B, fsdp": (8, {"model": _QWEN3_30B_A3B}),
    "Qwen3-30B-A3B, ep 8": (8, {"model": _QWEN3_30B_A3B, "parallel.ep": 8}),
    "Qwen3-30B-A3B, tp 8 × ep 8": (8, {"model": _QWEN3_30B_A3B, "parallel.tp": 8, "parallel.ep": 8}),
    "Qwen3-30B-A3B, tp 4 × ep 8": (8, {"model": _QWEN3_30B_A3B, "parallel.tp": 4, "parallel.ep": 8}),
    "GLM-4.5-Air with LoRA, fsdp": (64, _LORA),
    "GLM-4.5-Air with LoRA, fsdp, A100": (64, _LORA),
    "GLM-4.5-Air with LoRA, ep 8": (64, {**_LORA, "parallel.ep": 8}),
    "Llama 70B, fsdp": (256, {"model": _LLAMA_70B}),
    "Llama 70B, tp 8 × fsdp 32": (256, {"model": _LLAMA_70B, "parallel.tp": 8}),
}
"""Name → (GPUs, settings beside `COMMON`)."""
COMMON: dict[str, Any] = {
    "task.name": "hf_causal_lm", "parallel.strategy": "fsdp", "precision.mode": "bf16", "activation.policy": "full",
    "train.micro_batch_size": 1, "train.seq_len": 4096, "train.eval_samples": 0,
}  # fmt: skip


STEPS = 2
"""Of a rehearsal: the second has the optimizer's state from the first."""


def settings(name: str, folder: str) -> dict[str, Any]:
    """The keys of a case, whose model's config is written into the folder."""
    keys = {**COMMON, **CASES[name][1]}
    file = Path(folder, "config.json")  # as a hub has it: model.hf takes no key that the class does not declare
    file.write_text(json.dumps(keys.pop("model")))
    return {**keys, "model.hf_config": str(file)}


def card(name: str) -> str:
    """H100s prefer cuDNN's attention, whose workspace a rehearsal does not know; the plan counts flash attention's."""
    return "a100-80gb" if name.endswith("A100") else "h100"


def planned(name: str) -> dict[str, Any]:
    gpus = CASES[name][0]
    try:
        with TemporaryDirectory() as folder:
            return {"case": name, "gpus": gpus, **_estimate(gpus, card(name), settings(name, folder))}
    except ConfigError as error:
        return {"case": name, "gpus": gpus, "refused": error.cause}


def rehearsed(name: str) -> dict[str, Any]:
    """Rank 0's peak of a case; the other ranks are pretended."""
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        keys = {**settings(name, folder), "memory.plan": False, "run.device": "cuda", "run.dir": f"{folder}/run"}
        train = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
        world = ["--gpu", card(name), "--ranks", str(CASES[name][0]), "--steps", str(STEPS)]
        command = [
            sys.executable, "-m", "shardkit.cli", "rehearse", "--json", *world, "--",
            sys.executable, "-m", "shardkit.train", *train,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=REPO, env=environ(), stdout=subprocess.PIPE, text=True, check=True)
    (rank,) = json.loads(done.stdout)["ranks"]
    figures = {key: rank[key] for key in ("peak_allocated", "peak_reserved", "peak_in", "peak_step", "host_peak")}
    about = {"seconds": round(time.monotonic() - began), "torch": environment()["torch"], "measured": stamp()}
    return {**figures, **about}


def _estimate(gpus: int, card: str, settings: dict[str, Any]) -> dict[str, Any]:
    config = load_config(None, settings).config
    with Planner(choose_target(config, gpus, gpu=card)) as planner:
        # As the command does: from a few layers where that tells the verdict.
        estimate = planner.first_look(config)
        if estimate is None or not estimate.is_clear:
            estimate = planner.predict(config)
    return {
        "n_params": estimate.n_params, "peak": estimate.peak.allocated, "reserved": estimate.peak.reserved,
        "needed": estimate.needed, "memory": estimate.device_memory, "verdict": estimate.verdict,
        "ep_imbalance": estimate.ep_imbalance, "phase": estimate.peak.phase, "module": estimate.peak.module,
        "traced_layers": estimate.extrapolated_from,
        "categories": {key: part.device for key, part in estimate.categories.items()},
    }  # fmt: skip


def main() -> None:
    again = Option(False, "rehearse a rank of each case, and keep its plan")
    args = options(__doc__, only=ONLY, rehearse=again)
    known = {row["case"]: row for row in earlier("wide_plans").get("rows", [])}
    for name in chosen(CASES, args.only):
        row = known.get(name, {})
        if not args.rehearse:
            known[name] = {**planned(name), **{key: row[key] for key in row if key == "rehearsed"}}
        elif "peak" in row:
            known[name] = {**row, "rehearsed": rehearsed(name)}
        print(known.get(name), flush=True)
        write_result("wide_plans", {"rows": [known[name] for name in CASES if name in known]})


if __name__ == "__main__":
    main()
