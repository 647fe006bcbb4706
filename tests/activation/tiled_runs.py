"""The gathers of a step whose MLPs are computed in parts."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.parallel.context_runs import MODELS, completed


def gathers(cases: dict[str, dict[str, Any]]) -> dict[str, int]:
    """All-gathers of the second step: in the first one ZeRO-3 learns the order of modules."""
    counts = {}
    for name, given in cases.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            start(None, {**completed({**MODELS["llama"], **given}, folder, accum=1), **given}) as job,
        ):
            steps = iter(Trainer(job).steps())
            next(steps)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                next(steps)
            counts[name] = sum(event.count for event in profiler.key_averages() if event.key == "gloo:all_gather")
        gc.collect()
        dist.barrier()
    return counts
