"""Your own model in your own loop, under any strategy:

torchrun --standalone --nproc-per-node 2 examples/own_loop.py fsdp
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import shardkit


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def main(strategy: str, steps: int = 30) -> float:
    with shardkit.start(
        overrides={"parallel.strategy": strategy, "train.grad_accum_steps": 2, "optim.lr": 1e-2}
    ) as job:
        torch.manual_seed(0)  # the same initial weights on every rank
        job.wrap(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
        data = torch.Generator().manual_seed(1 + job.world.rank)
        for _ in range(steps):
            inputs = [torch.randn(8, 16, generator=data) for _ in range(2)]
            batches = [(x, x[:, :4].argmax(dim=1)) for x in inputs]
            result = job.step(batches, loss_fn, n_targets=lambda batch: len(batch[1]))
        rows = job.ledger.gather(job.step_index)
        if rows is not None:  # rank 0 has every rank's memory
            print(f"loss {result.loss:.3f}, gradient norm {result.grad_norm:.3f}")
            print(shardkit.memory_table(rows))
        return result.loss


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ddp")
