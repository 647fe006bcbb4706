"""The validation loss, and rank 0's summary at the end of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from ..data.loader import eval_batches
from ..launch.failures import job_starts
from ..parallel.blocks import release_graph_outputs
from ..strategies.step import to_device
from ..tasks.base import Dataset, Task
from . import directory
from .job import Job


def evaluate(job: Job, task: Task, data: Dataset, is_over: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Means over at most `train.eval_batches` micro-batches per rank of `data`; collective.

    Keys: `val_loss`, and `val_<name>` for each further metric of the task.

    Args:
        is_over: called before every micro-batch, with the same answer on every rank; True ends the evaluation with no
            means.
    """
    with torch.no_grad(), job.strategy.evaluating():
        return _means(job, task, data, is_over)


def _means(job: Job, task: Task, data: Dataset, is_over: Callable[[], bool]) -> dict[str, float]:
    model, world, train = job.model, job.world, job.config.train
    model.eval()
    sums: dict[str, torch.Tensor] = {}
    count = 0.0
    measure = getattr(task, "measure", None) or (lambda model, batch: {"loss": task.loss(model, batch)})
    collate = getattr(task, "collate", None)
    batches = eval_batches(data, train.micro_batch_size, world.rank, world.size, train.eval_batches, collate)
    for batch, is_filler in batches:
        if is_over():
            model.train()
            return {}
        release_graph_outputs()
        for name, value in measure(model, to_device(batch, world.device)).items():
            total = sums.setdefault(name, torch.zeros((), device=world.device))
            if not is_filler:
                total += value.float()
        count += 0 if is_filler else task.n_targets(batch)
    model.train()
    *totals, n = world.sum([*map(float, sums.values()), count])
    return {f"val_{name}": total / max(n, 1.0) for name, total in zip(sums, totals, strict=True)}


def report(job: Job, task: Task, run_dir: Path, measured: dict[str, float]) -> None:
    """Print every rank's memory, the last evaluation beside the task's baseline, restarts and files; on rank 0."""
    from ..memory.table import render_table  # imports rich, which would delay the first step

    print(render_table(job.ledger.last_rows))
    if "val_loss" in measured:
        val_loss = measured["val_loss"]
        for name, value in measured.items():
            print(f"validation {name.removeprefix('val_').replace('_', ' ')}: {value:.4f}")
        describe = getattr(task, "describe", dict)
        for name, value in describe().items():
            gain = f"  ({beside(val_loss, value)})" if "cross_entropy" in name else ""
            print(f"{name.replace('_', ' ')}: {value:.4f}{gain}")
    restarts = job_starts.summary(run_dir)
    if restarts is not None:
        print(restarts)
    print(f"files written: {directory.listed(run_dir)}")
    print(f"  look at them: shardkit report {shlex.quote(str(run_dir))}")


def beside(val_loss: float, baseline: float) -> str:
    """How far a validation loss is below or above a baseline, in per cent of the baseline."""
    share = 100 * (1 - val_loss / baseline)
    return f"validation loss is {abs(share):.1f} % {'below' if share >= 0 else 'above'}"
