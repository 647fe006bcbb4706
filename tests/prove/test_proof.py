"""Whole proofs: a program of two ranks and the same with one process, started as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.prove.verdict import WORDS

QUICKSTART = str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml")
PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

bug = sys.argv[1] if len(sys.argv) > 1 else ""
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if bug == "seed" else 0)
rows = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 4)) for i in range(256)]
sampler = DistributedSampler(rows, world, rank, seed=1) if bug != "rows" else None
loader = iter(DataLoader(rows, 4, sampler=sampler))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(16, 4))
net = model if bug in ("reduce", "seed") else torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if bug == "fails":
    raise ValueError("no such corpus")
for step in range(8):
    for micro in range(2):
        x, y = next(loader)
        if bug == "last":
            optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y) / 2
        (loss * world if bug == "scale" else loss).backward()
    if net is model:  # DDP would send rank 0's weights to all
        for p in list(model.parameters())[: -1 if bug == "reduce" else None]:
            dist.all_reduce(p.grad)
            p.grad /= world
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step == 3:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if bug == "zero":
            state["3.weight"][2:] = 0
        torch.save({"model": state}, "weights.pt")
"""


def prove(folder: Path, bug: str) -> tuple[int, dict[str, Any], str]:
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", *filter(None, [bug])]
    return run_prove(folder, command, *(["--until", "save"] if bug == "zero" else []))


def run_prove(folder: Path, command: list[str], *options: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "shardkit.cli", "prove", "--json", "verdict.json", *options, "--", *command],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if "cannot be kept from the machine" in done.stderr:
        pytest.skip("needs namespaces and overlays")
    assert (folder / "verdict.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((folder / "verdict.json").read_text()), done.stdout + done.stderr


@pytest.mark.dist
@pytest.mark.parametrize(("bug", "code", "word"), [
    ("", 0, None), ("last", 4, "micro-batches"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("reduce", 4, "not summed"), ("fails", 8, None), ("rows", 9, "rows"), ("scale", 4, "factor"),
        ("seed", 4, "copies differ"), ("zero", 4, "saved"),
    ]),
])  # fmt: skip
def test_a_program_and_its_defects(tmp_path: Path, bug: str, code: int, word: str | None) -> None:
    exit_code, verdict, output = prove(tmp_path, bug)
    assert (exit_code, verdict["exit_code"], verdict["word"]) == (code, code, word), output
    assert word is None or word in WORDS
    assert not (tmp_path / "weights.pt").exists()  # its writes are thrown away
    if bug == "last":
        assert "=> only the last micro-batch of a step counts" in output
        assert verdict["weights"]["rank 0 micro-batch 1"] == pytest.approx(
            {"parallel": 0, "one process": 0.25}, abs=1e-4
        )
    if bug == "scale":
        assert verdict["factor"] == pytest.approx(2) and "the number of ranks" in output
    if bug == "reduce":
        assert verdict["parameter"] == "3.bias"
    if bug == "fails":
        assert "ValueError: no such corpus" in output


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_shardkits_strategies_compute_the_gradients_and_weights_of_one_process(tmp_path: Path, strategy: str) -> None:
    train = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardkit.train", "--config", QUICKSTART]
    sizes = ["train.max_steps=20", "train.micro_batch_size=4", "train.seq_len=32", "run.device=cpu"]
    exit_code, _, output = run_prove(tmp_path, [sys.executable, *train, f"parallel.strategy={strategy}", *sizes])
    assert exit_code == 0, output
