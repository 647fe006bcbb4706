"""The validation loss, and what rank 0 says at the end of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from . import rundir
from .accumulate import to_device
from .data.loader import eval_batches
from .job import Job
from .tasks.base import Dataset, Task


@torch.no_grad()
def evaluate(job: Job, task: Task, data: Dataset) -> float:
    """Mean loss over at most `train.eval_batches` micro-batches per rank of `data`; collective."""
    model, world, train = job.model, job.world, job.config.train
    model.eval()
    loss_sum, count = torch.zeros((), device=world.device), 0.0
    collate = getattr(task, "collate", None)
    batches = eval_batches(data, train.micro_batch_size, world.rank, world.size, train.eval_batches, collate)
    for batch, is_filler in batches:
        loss = task.loss(model, to_device(batch, world.device)).float()
        if not is_filler:
            loss_sum += loss
            count += task.n_targets(batch)
    model.train()
    total, n = world.sum([float(loss_sum), count])
    return total / max(n, 1.0)


def report(job: Job, task: Task, run_dir: Path, val_loss: float | None) -> None:
    """Print every rank's memory, the validation loss beside the task's baseline, and the files written; on rank 0."""
    from .memory.table import render_table  # loads rich: not before the first step

    print(render_table(job.ledger.last_rows))
    if val_loss is not None:
        print(f"validation loss: {val_loss:.4f}")
        describe = getattr(task, "describe", dict)
        for name, value in describe().items():
            gain = (
                f"  (validation loss is {100 * (1 - val_loss / value):.1f} % below)" if "cross_entropy" in name else ""
            )
            print(f"{name.replace('_', ' ')}: {value:.4f}{gain}")
    print("files written:")
    for path in rundir.files_in(run_dir):
        print(f"  {path} ({path.stat().st_size:,} bytes)")
