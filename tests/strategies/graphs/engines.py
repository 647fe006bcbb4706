"""The engines that train a case, and what a rank does in a pool: one case after the other, until it is told to stop."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.errors import ShardkitError
from shardkit.parallel import compat
from shardkit.run.job import Job, start
from tests.ranks import REPO
from tests.strategies.cases import on_cpus

from .case import SAVED_AT, Curve
from .proof import recorder, watch

ENGINES: dict[str, dict[str, Any]] = {
    **{name: on_cpus(name) for name in ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")},
    "fsdp+offload": on_cpus("fsdp+param+optimizer"),
    "zero1+offload": on_cpus("zero1+optimizer"),
    "zero2+offload": on_cpus("zero2+optimizer"),
    "zero3+offload": on_cpus("zero3+param+optimizer"),
}
WORLDS = {"hsdp": 4}
"""Ranks of an engine, where the campaign's number does not do."""


@dataclass(frozen=True)
class Arm:
    """A case under an engine, recorded in a folder; with `then` it is saved after half of the steps and resumed under
    that engine."""

    case: Any
    engine: str
    folder: Path
    then: str | None = None

    @property
    def records(self) -> Path:
        return self.folder / "ranks"

    @property
    def compiles(self) -> bool:
        return any("zero" in name and "offload" in name for name in (self.engine, self.then or ""))

    def run(self, curve: Curve) -> None:
        record, saved = recorder(self.records, self.case.steps), str(self.folder / "saved")
        switch = self.case.steps if self.then is None else SAVED_AT
        with _job(self, self.engine, record) as job:
            _steps(job, self.case, range(switch), curve)
            if self.then is None:
                return
            checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, saved, timeout_s=60)
            checkpoints.save(RunState(step=SAVED_AT, seed=0))
            checkpoints.close()
        gc.collect()
        with _job(self, self.then, record) as job:
            checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, saved, timeout_s=60)
            assert checkpoints.resume(saved) is not None, "the checkpoint is there"
            _steps(job, self.case, range(SAVED_AT, self.case.steps), curve)
            checkpoints.close()

    def __str__(self) -> str:
        return f"{self.engine}{f' → {self.then}' if self.then else ''} {self.case}"


@dataclass(frozen=True)
class Report:
    """What one rank found.

    Attributes:
        curve: of the steps that it took.
        error: the refusal's words, or the traceback.
        refused: the error is one of shardkit's own.
        clean: its error left no process group behind, so the rank can go on.
        at: when it ended (time.monotonic): what one rank ends with may be what another one's end does to it.
    """

    curve: Curve
    error: str = ""
    refused: bool = False
    clean: bool = True
    at: float = field(default_factory=time.monotonic, compare=False)


def settings(arm: Arm, engine: str) -> dict[str, Any]:
    found = {**arm.case.settings, **ENGINES[engine]}
    found["train.micro_batch_size"] = arm.case.rows // (dist.get_world_size() // found.get("parallel.cp", 1))
    if "fsdp" not in engine and engine != "hsdp":
        found.pop("parallel.reshard_after_forward", None)
        found.pop("parallel.no_sync", None)
    return found


@contextlib.contextmanager
def _job(arm: Arm, engine: str, recorder: Any) -> Iterator[Job]:
    with start(None, settings(arm, engine)) as job:
        job.wrap(arm.case.build() if arm.case.prebuilt else arm.case.build)
        watch(recorder, job)
        yield job


def _steps(job: Job, case: Any, steps: range, curve: Curve) -> None:
    for step in steps:
        taken = job.step(case.batches(step, job.world.rank, job.world.size), case.loss, case.n_targets)
        curve.append((taken.loss, taken.grad_norm))


def _report(payload: Any) -> Report:
    curve: Curve = []
    groups = list(compat.groups())
    try:
        payload.run(curve)
    except ShardkitError as error:
        return Report(curve, str(error), refused=True, clean=set(compat.groups()) <= set(groups))
    except BaseException:
        return Report(curve, traceback.format_exc().replace(f"{REPO}/", ""), clean=False)
    finally:
        gc.collect()
        sys.stdout.flush()
    return Report(curve)


def serve(pipes: list[Connection], stacks: str) -> None:
    """Body of the ranks of a pool: runs payloads and sends reports. SIGUSR1 writes where the rank stands."""
    rank = dist.get_rank()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with open(f"{stacks}/{rank}.stack", "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        while (payload := pipes[rank].recv()) is not None:
            pipes[rank].send(_report(payload))
        faulthandler.unregister(signal.SIGUSR1)
