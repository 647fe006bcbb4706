"""The cost of planning: seconds and memory from a fresh process to the estimate, by depth, width and world size.

`python -m benchmarks.plan` plans each case on fake H100s, each time in a fresh process; this includes the start-up of
Python and torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

from .common import REPO, earlier, publish
from .models import LLAMA_70B
from .options import ONLY, Option, chosen, options

GOALS = {"llama 70b, fsdp × 1024": {"seconds": 10, "gib": 4}, "355m, fsdp × 8": {"seconds": 5, "gib": 4}}
FSDP = ["parallel.strategy=fsdp", "precision.mode=bf16", "train.micro_batch_size=1"]
MIDDLE = ["precision.mode=bf16", "model.preset=355m", "train.seq_len=1024"]
LARGE = [
    "task.name=hf_causal_lm", "train.seq_len=8192", "activation.policy=full",
    "model.hf=" + json.dumps({"model_type": "llama", **LLAMA_70B}),
]  # fmt: skip
CASES: dict[str, tuple[int, list[str]]] = {
    "355m, fsdp × 8": (8, [*FSDP, "model.preset=355m", "train.seq_len=1024"]),
    "355m, ddp × 8": (8, [*MIDDLE, "parallel.strategy=ddp"]),
    "355m, zero2 × 8": (8, [*MIDDLE, "parallel.strategy=zero2"]),
    "355m, zero3 × 8": (8, [*MIDDLE, "parallel.strategy=zero3"]),
    "13b, fsdp × 8": (8, [*FSDP, "model.preset=13b", "train.seq_len=2048"]),
    "13b, fsdp × 64": (64, [*FSDP, "model.preset=13b", "train.seq_len=2048"]),
    "llama 70b, fsdp × 1024": (1024, [*FSDP, *LARGE]),
}
ROUNDS = 3


def once(world_size: int, overrides: list[str]) -> tuple[float, float]:
    """(seconds, GiB of the largest process) for one `shardkit plan`."""
    target = ["--gpus", str(world_size), "--gpu", "h100"]
    command = [sys.executable, "-m", "shardkit.cli", "plan", "-", *overrides, *target, "--json", "--no-advice"]
    timed = "import resource, subprocess, sys; c = subprocess.run(sys.argv[1:], stdout=-3).returncode; "
    timed += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(c if c != 4 else 0)"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", timed, *command], capture_output=True, text=True, cwd=REPO)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return time.perf_counter() - began, int(done.stdout) / 2**20


def main() -> None:
    args = options(__doc__, rounds=Option(ROUNDS, "plans of each case"), only=ONLY)
    rows: dict[str, Any] = earlier("plan").get("cases", {})
    for name in chosen(CASES, args.only):
        world_size, overrides = CASES[name]
        samples = [once(world_size, overrides) for _ in range(args.rounds)]
        rows[name] = {
            "seconds": median(seconds for seconds, _ in samples), "gib": max(gib for _, gib in samples),
            "samples": samples,
        }  # fmt: skip
    publish("plan", {"goals": GOALS, "cases": {name: rows[name] for name in CASES if name in rows}})


if __name__ == "__main__":
    main()
