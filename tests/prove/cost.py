"""What a proof costs: `python -m tests.prove.cost ddp start` runs a program by itself and under a proof, in turns.

It prints a line of JSON with the seconds of both: from a command's start to its end for two steps, or of a step of
rank 0, by itself and recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

strategy, width, n_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
length = width // 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(512, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(4)
        )
        self.head = torch.nn.Linear(width, 512)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


rows = torch.randint(512, (512, length))
loader = iter(DataLoader(rows, 8 // world, sampler=DistributedSampler(rows, world, rank)))
model = Model()
if strategy == "ddp":
    net = torch.nn.parallel.DistributedDataParallel(model)
if strategy == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for layer in model.layers:
        fully_shard(layer)
    net = fully_shard(model)
if strategy == "zero2":
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its extension would be compiled for minutes
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config={
        "train_micro_batch_size_per_gpu": 8 // world, "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    })
else:
    optimizer = torch.optim.AdamW(net.parameters())
for step in range(n_steps):
    begin = time.perf_counter()
    tokens = next(loader)
    if strategy == "zero2":
        engine.backward(engine(tokens))
        engine.step()
    else:
        net(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"step took {time.perf_counter() - begin:.6f}", flush=True)
"""
WIDTHS = {"tiny": 32, "small": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", choices=["ddp", "fsdp2", "zero2"])
    parser.add_argument("part", choices=["start", "tiny", "small"], help="a start, or a step of a model of that size")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    a = parser.parse_args()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    n_steps, width = (2, WIDTHS["tiny"]) if a.part == "start" else (a.steps, WIDTHS[a.part])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(PROGRAM)
        for number in range(a.rounds):
            for is_proof in (False, True):
                taken, steps = run(folder, f"round{number}", a.strategy, width, n_steps, is_proof)
                seconds[is_proof].append(taken if a.part == "start" else median(steps[2:]))
    alone, proven = median(seconds[False]), median(seconds[True])
    print(json.dumps({
        "strategy": a.strategy, "part": a.part, "torch": torch.__version__, "rounds": a.rounds,
        "alone_s": round(alone, 4), "proof_s": round(proven, 4), "ratio": round(proven / alone, 2),
    }))  # fmt: skip


def run(folder: Path, name: str, strategy: str, width: int, n_steps: int, is_proof: bool) -> tuple[float, list[float]]:
    """The seconds of a run, and of each step of rank 0."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py",
        strategy, str(width), str(n_steps),
    ]  # fmt: skip
    if is_proof:
        options = ["--steps", str(n_steps), "--keep", name]
        command = [sys.executable, "-m", "shardkit.cli", "prove", *options, "--", *command]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    taken = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    log = (folder / name / "run1" / "log").read_text() if is_proof else done.stdout
    return taken, [float(number) for number in re.findall(r"step took (\S+)", log)]


if __name__ == "__main__":
    main()
