"""Ways in which right programs train: each is the same, or a proof says why it cannot tell."""

from __future__ import annotations

import shlex
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
        return iter(rows[rank::world] if way == "iterable" else rows[::-1])

if way in ("iterable", "backwards"):
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

class Scored(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.net(x), y)

if way == "random batches":  # nanoGPT's kind: no loader, and as many rows in a step whatever the number of ranks
    net = torch.nn.parallel.DistributedDataParallel(Scored())
    torch.manual_seed(rank)
    for _ in range(4):
        for _ in range(4 // world):
            (net(torch.randn(2, 8), torch.randint(4, (2,))) / (4 // world)).backward()
        optimizer.step()
        optimizer.zero_grad()
for x, y in loader:
    if way == "closure":  # Lightning's kind of step
        def gradients():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss
        optimizer.step(gradients)
        continue
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "16 bits" and world == 1):
        loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
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
    ("random batches", 0), ("backwards", 0), ("16 bits", 0), ("closure", 0),
])  # fmt: skip
def test_a_way_to_train_is_the_same_or_said_not_to_be_seen(tmp_path: Path, way: str, code: int) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    against = []
    if way == "backwards":  # one process, whose loader gets the batches of ranks in another order
        way, against = "iterable", ["--against", shlex.join([*run, "1", "train.py", "backwards"])]
    exit_code, verdict, output = run_prove(tmp_path, [*run, "2", "train.py", way], *against)
    assert exit_code == code, output
    if way == "experts":
        assert any("expert1.weight: one process does not have it" in reason for reason in verdict["reasons"]), output


PIPELINE = """
import sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

way = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 4)) for i in range(256)]

class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows)

loader = iter(DataLoader(Stream(), 4))
if way == "shrinks":  # no loader that gives one process the ranks' batches
    loader = ((torch.stack([x for x, _ in rows[i:i + 4]]), torch.arange(4)) for i in range(0, 256, 4))
norm = torch.nn.BatchNorm1d(16) if way == "cut" else torch.nn.Identity()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), norm, torch.nn.GELU(), torch.nn.Linear(16, 4))
net = model if world == 1 else model[3:] if rank else model[:3]
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
shrinks = world > 1 and way == "shrinks"
for step in range(4):
    for _ in range(2):
        batch = next(loader)
        micro = [batch] if way != "cut" or world == 1 else [*zip(*(t.chunk(2) for t in batch))]
        for x, y in micro:
            if rank:
                x = torch.empty(len(y), 16)
                dist.recv(x, 0)
                x.requires_grad_()
            out = net(x)
            if world == 1 or rank:
                loss = torch.nn.functional.cross_entropy(out, y) / len(micro)
                (loss if shrinks else loss / 2).backward()
            else:
                dist.send(out.detach(), 1)
                gradient = torch.empty_like(out)
                dist.recv(gradient, 1)
                out.backward(gradient)
            if rank:
                dist.send(x.grad, 0)
            for p in net.parameters() if shrinks else ():
                p.grad /= 2  # those of earlier micro-batches, too
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "code"), [("shrinks", 4), ("cut", 7)])
def test_a_pipeline_is_not_right_or_its_rows_may_act_on_each_other(tmp_path: Path, way: str, code: int) -> None:
    """Earlier micro-batches count less; or each batch of one process, whose rows share a norm, is cut in two."""
    (tmp_path / "train.py").write_text(PIPELINE)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", way]
    exit_code, verdict, output = run_prove(tmp_path, run)
    assert exit_code == code, output
    if code == 4:
        assert verdict["parameter"] == "3.bias", output
    else:
        assert "the ranks call modules with [2] rows, one process with [4]" in output
