"""The memory ledger alone, around a training loop that knows nothing of shardkit:

torchrun --standalone --nproc-per-node 2 examples/memory_ledger.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkit.memory import MemoryLedger, read_jsonl


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """A plain loop: nothing in it is for the ledger."""
    for _ in range(steps):
        x = torch.randn(32, 16)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(path: str = "memory.jsonl") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4)))
    optimizer = torch.optim.AdamW(model.parameters())

    ledger = MemoryLedger.from_env()  # collective: every rank makes one
    with ledger.watch(model, optimizer, path=path):
        train(model, optimizer, steps=20)
    table = ledger.table()  # every rank's memory; empty on the other ranks
    if dist.get_rank() == 0:
        print(table)
        for step, rows in read_jsonl(path):
            optimizer_bytes = [row.state["optimizer"].total for row in rows if row.state is not None]
            print(f"step {step}: optimizer state of each rank {optimizer_bytes} bytes")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --standalone --nproc-per-node 2 examples/memory_ledger.py")
    main()
    dist.destroy_process_group()  # after the model is gone: DDP, freed later, can wait for gloo's threads for ever
