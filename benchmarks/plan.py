"""The cost of planning: seconds and memory from a fresh process to the estimate, by depth, width and world size.

`python -m benchmarks.plan` plans each case on fake H100s three times, each time in a fresh process; this includes the
start-up of Python and torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

from .common import REPO, write_result
from .options import options

GOALS = {"llama 70b, fsdp × 1024": {"seconds": 10, "gib": 4}, "355m, fsdp × 8": {"seconds": 5, "gib": 4}}
LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
FSDP = ["parallel.strategy=fsdp", "precision.mode=bf16", "train.micro_batch_size=1"]
MIDDLE = ["precision.mode=bf16", "model.preset=355m", "train.seq_len=1024"]
LARGE = ["task.name=hf_causal_lm", "train.seq_len=8192", "activation.policy=full", "model.hf=" + json.dumps(LLAMA_70B)]
CASES: dict[str, tuple[int, list[str]]] = {
    "355m, fsdp × 8": (8, [*FSDP, "model.preset=355m", "train.seq_len=1024"]),
    "355m, ddp × 8": (8, [*MIDDLE, "parallel.strategy=ddp"]),
    "355m, zero2 × 8": (
        8,
        ["parallel.strategy=zero2", "precision.mode=bf16", "model.preset=355m", "train.seq_len=1024"],
    ),
    "355m, zero3 × 8": (
        8,
        ["parallel.strategy=zero3", "precision.mode=bf16", "model.preset=355m", "train.seq_len=1024"],
    ),
    "13b, fsdp × 8": (8, [*FSDP, "model.preset=13b", "train.seq_len=2048"]),
    "13b, fsdp × 64": (64, [*FSDP, "model.preset=13b", "train.seq_len=2048"]),
    "llama 70b, fsdp × 1024": (1024, [*FSDP, *LARGE]),
}
ROUNDS = 3


def once(world_size: int, overrides: list[str]) -> tuple[float, float]:
    """(seconds, GiB of the largest process) for one `shardkit plan`."""
    asked = ["plan", "-", *overrides, "--gpus", str(world_size)]
    command = [sys.executable, "-m", "shardkit.cli", *asked, "--gpu", "h100",
               "--json", "--no-advice"]  # fmt: skip
    timed = "import resource, subprocess, sys; c = subprocess.run(sys.argv[1:], stdout=-3).returncode; "
    timed += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(c if c != 4 else 0)"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", timed, *command], capture_output=True, text=True, cwd=REPO)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return time.perf_counter() - began, int(done.stdout) / 2**20


def main() -> None:
    options(__doc__)
    rows: dict[str, Any] = {}
    for name, (world_size, overrides) in CASES.items():
        samples = [once(world_size, overrides) for _ in range(ROUNDS)]
        rows[name] = {
            "seconds": median(seconds for seconds, _ in samples), "gib": max(gib for _, gib in samples),
            "samples": samples,
        }  # fmt: skip
        print(f"{name:28s} {rows[name]['seconds']:6.1f} s  {rows[name]['gib']:5.2f} GiB", flush=True)
    print("written:", write_result("plan", {"goals": GOALS, "cases": rows}))


if __name__ == "__main__":
    main()
