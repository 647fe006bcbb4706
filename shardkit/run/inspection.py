"""Steps that are inspected: profiled (`profile.start`), or traced tensor by tensor (`memory.trace_step`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..files import write_whole
from ..hardware.cards import blas_workspace
from ..memory.phases import Phases
from ..strategies.batches import tensors_of
from .optimizer_step import OptimizerStep
from .profiler import Profiler


@contextmanager
def inspected(step: OptimizerStep, profiler: Profiler | None, run_dir: Path) -> Iterator[Phases]:
    """The context in which a step is taken; yields the ledger's phases, also profiled or traced if that is due."""
    phases: Phases = step.job.ledger if profiler is None else profiler.before(step.number)
    with _traced(step, phases, run_dir) as phases:
        yield phases
    if profiler is not None:
        if profiler.ends_with(step.number) and step.reduction.has_begun:
            # torch corrupts the heap if its profiler stops while gloo runs a collective that began under it.
            step.reduction.wait()
        profiler.after(step.number)


def _traced(step: OptimizerStep, phases: Phases, run_dir: Path) -> AbstractContextManager[Phases]:
    """The context of a step, which yields its phases; traced if this is the step of `memory.trace_step`."""
    job = step.job
    if step.number != job.config.memory.trace_step:
        return nullcontext(phases)
    from ..memory.tracing.compat import TRACKER
    from ..memory.tracing.traced_step import FOLDER, traced_step

    if not TRACKER.works("memory.trace_step"):
        return nullcontext(phases)

    def save(trace: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(trace) + "\n")

    path = run_dir / FOLDER / f"rank{job.world.rank}.json"
    device, workspace = job.world.device, 0
    if device.type == "cuda":
        setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        workspace = blas_workspace(torch.cuda.get_device_capability(device), setting)
    data = tensors_of(step.micro_batches)
    return traced_step(job.strategy, job.model, phases, device, step.number, save, workspace, data)
