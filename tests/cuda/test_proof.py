"""`shardkit prove --gpus`: programs that insist on CUDA and NCCL are proven on emulated cards that compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.rehearsals import linked_cache
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.timeout(300)]
PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

layout, bug, card = sys.argv[1:]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
assert card in torch.cuda.get_device_name()
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 4)) for i in range(64)]
loader = iter(DataLoader(rows, 4, sampler=DistributedSampler(rows, world, rank, seed=1), pin_memory=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).cuda()
if layout == "ddp":
    net = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
else:
    net = fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    for micro in range(2):
        x, y = (t.cuda(non_blocking=True) for t in next(loader))
        if bug == "last":
            optimizer.zero_grad()
        (torch.nn.functional.cross_entropy(net(x), y) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_cache(tmp_path_factory.mktemp("cache"), "-computing")


@pytest.mark.parametrize(("layout", "bug", "options", "code", "word"), [
    ("ddp", "none", ["--gpu", "a100-40gb"], 0, None), ("ddp", "last", [], 4, "micro-batches"),
    pytest.param("fsdp2", "none", [], 0, None, marks=pytest.mark.slow),
    pytest.param("fsdp2", "last", [], 4, "micro-batches", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_program_that_insists_on_nccl(
    cache: Path, tmp_path: Path, layout: str, bug: str, options: list[str], code: int, word: str | None
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    card = "A100" if options else "H100"
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", layout, bug, card]
    prove = ["prove", "--gpus", "2", *options, "--json", "verdict.json", "--", *ranks]
    done = subprocess.run(
        [sys.executable, "-m", "shardkit.cli", *prove],
        cwd=tmp_path, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["word"] == word, done.stdout
