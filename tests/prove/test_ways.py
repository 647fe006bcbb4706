"""Ways in which right programs train: each is the same, or a proof says why it cannot tell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.prove.test_proof import run_prove

PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

way = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 4)) for i in range(256)]

class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows[rank::world])

if way == "iterable":
    loader = DataLoader(Stream(), 8 // world)
else:
    loader = DataLoader(rows, 8 // world, sampler=DistributedSampler(rows), num_workers=2 if way == "workers" else 0)
layers = {"in": torch.nn.Linear(8, 16), f"expert{rank if way == 'experts' else 0}": torch.nn.Linear(16, 4)}
model = torch.nn.Sequential()
for name, layer in layers.items():
    model.add_module(name, layer)
net = model if way in ("in backward", "experts") else torch.nn.parallel.DistributedDataParallel(model)
net = torch.compile(net, backend="aot_eager") if way == "compiled" else net

def average(p):
    dist.all_reduce(p.grad)
    p.grad /= world

if way == "in backward":
    def step_of(optimizer):
        def update(p):
            average(p)
            optimizer.step()
            optimizer.zero_grad()
        return update
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_of(torch.optim.AdamW([p], lr=1e-2)))
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True if way == "fused" else None)
for x, y in loader:
    torch.nn.functional.cross_entropy(net(x), y).backward()
    if way == "experts":
        for p in layers["in"].parameters():
            average(p)
    if way != "in backward":
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "code"), [
    ("compiled", 0), ("fused", 0), ("in backward", 0), ("workers", 0), ("iterable", 0), ("experts", 7),
])  # fmt: skip
def test_a_way_to_train_is_the_same_or_said_not_to_be_seen(tmp_path: Path, way: str, code: int) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", way]
    exit_code, verdict, output = run_prove(tmp_path, command)
    assert exit_code == code, output
    if way == "experts":
        assert any("expert1.weight: one process does not have it" in reason for reason in verdict["reasons"]), output
