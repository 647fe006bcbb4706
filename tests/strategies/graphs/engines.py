"""The engines that train a case, and what a rank does in a pool: one case after the other, until it is told to stop."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.errors import ShardkitError
from shardkit.parallel import compat
from shardkit.run.job import Job, start
from tests.ranks import REPO
from tests.strategies.cases import PARTITION_ALL

from .case import ROWS, SAVED_AT, STEPS, Case, Curve, loss_fn, micro_batches, n_targets

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.strategy": "ddp"},
    "fsdp": {"parallel.strategy": "fsdp"},
    "hsdp": {"parallel.strategy": "hsdp", "parallel.dp_replicate": 2, "parallel.dp_shard": 2},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3", "parallel.ds_config": PARTITION_ALL},
    "fsdp+offload": {"parallel.strategy": "fsdp", "parallel.offload_param": "cpu", "parallel.offload_optimizer": "cpu"},
    "zero2+offload": {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu"},
    "zero3+offload": {
        "parallel.strategy": "zero3",
        "parallel.offload_param": "cpu",
        "parallel.offload_optimizer": "cpu",
        "parallel.ds_config": PARTITION_ALL,
    },
}
WORLDS = {"hsdp": 4}
"""Ranks of an engine; 2 of those that are not named."""


class Payload(Protocol):
    """What the ranks of a pool run; it pickles.

    Attributes:
        compiles: it needs DeepSpeed's CPU optimizer, which is compiled where it is used first.
    """

    @property
    def compiles(self) -> bool: ...

    def run(self, curve: Curve) -> None:
        """Appends each step's loss and norm to `curve`, which then says how far the rank came."""


@dataclass(frozen=True)
class Arm:
    """A case under an engine; with `then` it is saved after half of the steps and resumed under that engine."""

    case: Case
    engine: str
    then: str | None = None
    folder: str = ""

    @property
    def compiles(self) -> bool:
        return any("zero" in name and "offload" in name for name in (self.engine, self.then or ""))

    def run(self, curve: Curve) -> None:
        try:
            _train(self, curve)
        finally:
            if self.folder and dist.get_rank() == 0:
                shutil.rmtree(self.folder, ignore_errors=True)

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
    found = {**arm.case.settings, "run.device": "cpu", **ENGINES[engine]}
    found["train.micro_batch_size"] = ROWS // WORLDS.get(engine, 2)
    if "fsdp" not in engine and engine != "hsdp":
        found.pop("parallel.reshard_after_forward", None)
    return found


@contextlib.contextmanager
def _job(arm: Arm, engine: str) -> Iterator[Job]:
    with start(None, settings(arm, engine)) as job:
        job.wrap(arm.case.build() if arm.case.prebuilt else arm.case.build)
        yield job


def _steps(job: Job, case: Case, steps: range, curve: Curve) -> None:
    for step in steps:
        batches = micro_batches(case.seed, step, case.accumulation, job.world.rank, job.world.size)
        taken = job.step(batches, loss_fn, n_targets)
        curve.append((taken.loss, taken.grad_norm))


def _train(arm: Arm, curve: Curve) -> None:
    if arm.then is None:
        with _job(arm, arm.engine) as job:
            _steps(job, arm.case, range(STEPS), curve)
        return
    for engine, steps in ((arm.engine, range(SAVED_AT)), (arm.then, range(SAVED_AT, STEPS))):
        with _job(arm, engine) as job:
            checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, arm.folder, timeout_s=60)
            if steps.start:
                assert checkpoints.resume(arm.folder) is not None, "the checkpoint is there"
            _steps(job, arm.case, steps, curve)
            if not steps.start:
                checkpoints.save(RunState(step=SAVED_AT, seed=0))
            checkpoints.close()
        gc.collect()


class LeaveGroups:
    """Leave the process groups that a refused payload left behind, and see that the ranks still understand each other.

    For ranks that all refused before an update: none of them waits for a message of another one.
    """

    compiles = False

    def run(self, curve: Curve) -> None:
        for group in _left_behind:
            dist.destroy_process_group(group)
        _left_behind.clear()
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((1000,), float(dist.get_world_size()))), "a message of the refused payload"


_left_behind: list[dist.ProcessGroup] = []
"""The process groups of the last payload, if it was refused."""


def _report(payload: Payload) -> Report:
    curve: Curve = []
    groups = list(compat.groups())
    try:
        payload.run(curve)
    except ShardkitError as error:
        _left_behind[:] = [group for group in compat.groups() if group not in groups]
        return Report(curve, str(error), refused=True, clean=not _left_behind)
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
