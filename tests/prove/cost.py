"""What a proof costs: `python -m tests.prove.cost ddp start` runs a program by itself and under a proof, in turns.

It prints a line of JSON with the seconds of both, and those of the CPU, which other jobs on the machine change less:
from a command's start to its end for two steps, or of a step of rank 0, by itself and recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from shardkit.prove.runs import PlannedStep, Runner
from shardkit.rehearse.rehearsal import Limits

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
    begin, cpu = time.perf_counter(), time.process_time()
    tokens = next(loader)
    if strategy == "zero2":
        engine.backward(engine(tokens))
        engine.step()
    else:
        net(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"step took {time.perf_counter() - begin:.6f} {time.process_time() - cpu:.6f}", flush=True)
"""
WIDTHS = {"tiny": 32, "small": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", choices=["ddp", "fsdp2", "zero2"])
    parser.add_argument("part", choices=["start", "tiny", "small"], help="a start, or a step of a model of that size")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    a = parser.parse_args()
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    n_steps, width = (2, WIDTHS["tiny"]) if a.part == "start" else (a.steps, WIDTHS[a.part])
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", a.strategy, str(width), str(n_steps)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(PROGRAM)
        os.chdir(folder)
        os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        for number in range(a.rounds):
            for is_proof in (False, True):
                command = [sys.executable, *words]
                if is_proof and a.part == "start":
                    command = [sys.executable, "-m", "shardkit.cli", "prove", "--", *command]
                if is_proof and a.part != "start":
                    steps = [PlannedStep(f"step{index + 1}") for index in range(n_steps)]
                    recorded = Runner(folder / f"round{number}", Limits()).start(command, steps)
                    seconds[is_proof].append(of_a_step(recorded.log))
                else:
                    log, taken = run(command)
                    seconds[is_proof].append(taken if a.part == "start" else of_a_step(log))
    (alone, cpu_alone), (proven, cpu_proven) = (
        [median(numbers) for numbers in zip(*seconds[kind], strict=True)] for kind in (False, True)
    )
    print(json.dumps({
        "strategy": a.strategy, "part": a.part, "torch": torch.__version__, "rounds": a.rounds,
        "alone_s": round(alone, 4), "proof_s": round(proven, 4), "ratio": round(proven / alone, 2),
        "alone_cpu_s": round(cpu_alone, 4), "proof_cpu_s": round(cpu_proven, 4),
        "cpu_ratio": round(cpu_proven / cpu_alone, 2),
    }))  # fmt: skip


def run(command: list[str]) -> tuple[str, tuple[float, float]]:
    """What a command prints, and its seconds with those of the CPU."""
    begin, cpu = time.perf_counter(), cpu_s()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout, (time.perf_counter() - begin, cpu_s() - cpu)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def of_a_step(log: str) -> tuple[float, float]:
    """The median seconds of rank 0's steps but for two, which warm up, and those of the CPU."""
    steps = [(float(wall), float(cpu)) for wall, cpu in re.findall(r"step took (\S+) (\S+)", log)]
    wall, cpu = zip(*steps[2:], strict=True)
    return median(wall), median(cpu)


if __name__ == "__main__":
    main()
