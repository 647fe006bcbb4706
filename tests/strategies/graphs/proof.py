"""Records what ranks compute as `shardkit prove` does, and judges it by its comparer: every gradient before clipping
and every weight after each step, within the measured rounding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.parallel.precision import compute_dtype
from shardkit.prove.inject import shardkit_pieces as pieces
from shardkit.prove.judge import Judge
from shardkit.prove.replay import Proof
from shardkit.prove.runs import INJECT, RecordedRun, Runner
from shardkit.rehearse.rehearsal import Limits
from shardkit.run.job import Job
from shardkit.strategies.base import StepRequest, Update

sys.path.append(str(INJECT))  # the recorder imports its neighbour by its bare name, as in a stranger's program
from shardkit_proof import ProofRecorder, canonical  # type: ignore[import-not-found]


def recorder(folder: Path, n_steps: int, ranks: Path | None = None, moved: bool = False) -> Any:
    """A recorder of so many steps; with the records of `ranks`, each step begins with their weights.

    `moved`: each weight is moved by an ulp, which measures rounding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = "moved" if moved else "step"
    # One more step than are taken: after its last one a recorder ends the process.
    steps: list[dict[str, Any]] = [{"name": f"{name}{n}"} for n in range(1, n_steps + 2)]
    if ranks is None:
        return ProofRecorder(str(folder), {"steps": steps})
    steps = [{**step, "weights": n, "gradients": n + 1, "moved": moved} for n, step in enumerate(steps)]
    return ProofRecorder(str(folder), {"steps": steps, "parallel": str(ranks)})


def begin(recorder: Any, model: nn.Module) -> None:
    """Record the weights of a model, or give it those of the ranks; a later model goes on where an earlier ended."""
    recorder.roots = [model]
    if not recorder.index:
        recorder._start()


def watch(recorder: Any, job: Job) -> None:
    """Record each further step of a job."""
    strategy = job.strategy
    take_step, dtype = strategy.step, compute_dtype(job.config.precision)
    recorder.compute = "" if dtype == torch.float32 else str(dtype).removeprefix("torch.")

    def step(request: StepRequest) -> Update:
        recorder.before_step(None)
        update = take_step(request)
        recorder.record["norms"].append(float(update.grad_norm))
        recorder.end_step()
        return update

    begin(recorder, strategy.model)
    strategy.step = step  # type: ignore[method-assign]


def first_difference(ranks: Path, process: Path, n_steps: int, world: int) -> tuple[int, str]:
    """The first of so many steps that is not that of one process, and the verdict on it; (0, "") if all are."""
    pieces._MAPS.clear()  # each holds a file open
    proof = Proof([], [], False, Runner(process, Limits()), RecordedRun(ranks, (), 0, ""), None, world)
    run = RecordedRun(process, (), 0, "")
    proof.taken = {f"{kind}{n}": run for kind in ("step", "moved") for n in range(1, n_steps + 1)}
    judge = Judge(proof, range(1, n_steps + 1), dict.fromkeys(range(1, n_steps + 1), ("same", "")))
    verdict = judge.copies_at_start()
    for number in range(1, n_steps + 1):
        verdict = verdict or judge.step(number)
        if verdict is not None:
            return number, verdict.text()
    return 0, ""


def starts_apart(ranks: Path, model: nn.Module) -> list[str]:
    """Parameters of a model that the ranks started with other values."""
    stored = pieces.by_name(pieces.read(str(ranks), "start"), "weights")
    apart = []
    for name, parameter in model.named_parameters():
        tensor, _ = pieces.assemble(str(ranks), stored.get(canonical(name), {}), tuple(parameter.shape))
        if tensor is None or not torch.equal(tensor, parameter):
            apart.append(name)
    return apart
