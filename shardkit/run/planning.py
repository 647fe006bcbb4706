"""Plan a run while it takes its first steps, on rank 0's machine, and show the plan there."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from ..config.schema import RunConfig
from ..errors import ShardkitError, gib
from ..files import n_cpus
from ..hardware.cards import DEFAULT, GPUS
from ..memory.probe import local_tensors, tightest_limit
from ..oom.postmortem import Advice
from ..plan.advise import changes_that_fit
from ..plan.client import Planner
from ..plan.model.estimate import MemoryEstimate, digest
from ..plan.target import Target, known_here
from ..report import planned
from .job import Job

LIMIT_S = 60.0
"""Most seconds for a plan; it is then abandoned."""
CLAIM = ".shardkit/planning"
"""The file by which the first rank that runs out of memory claims the planning of advice."""
RANKS = 4
"""Most ranks to plan: one for each size of shards, and the last one under ZeRO-1 and 2."""
_HOST_BYTES = 8 * 2**30
"""Bytes of host memory that must be free for `memory.plan=auto`; planning takes one or two GiB of them."""
_STOP_S = 10.0
_LOG = logging.getLogger(__name__)


class RunPlan:
    """Predicts the memory of this process's run; a context manager that ends the planning on exit.

    It works in its own process, at the lowest priority and with a time limit. A failure of the plan never fails the
    run.
    """

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._thread: threading.Thread | None = None
        self._deadline = 0.0
        self._over = self._stopped = False

    def __enter__(self) -> RunPlan:
        return self

    def __exit__(self, *raised: object) -> None:
        self._over = True
        self._stop()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def begin(self, job: Job, run_dir: Path) -> None:
        """Start planning, if `memory.plan` asks for it; the job is wrapped. Collective."""
        setting = job.config.memory.plan
        if job.world.is_main:
            _forget_another(run_dir / "plan.json", job.config, job.world.size)
        if setting is False or (setting == "auto" and job.world.device.type != "cuda"):
            return
        # Bytes of state, without the padding that makes all ranks' storages equal.
        state = (local for _, tensor in job.strategy.state_tensors() for local in local_tensors(tensor))
        shards = [str(n_bytes) for n_bytes in job.world.gather(sum(local.nbytes for local in state))]
        if not job.world.is_main or (run_dir / "plan.json").exists():
            return
        limit = tightest_limit()
        has_room = n_cpus() > 1 and limit.n_bytes - limit.in_use() > _HOST_BYTES
        if setting == "auto" and not has_room:  # a planning process would slow the run
            return
        ranks = sorted(shards.index(size) for size in set(shards))[:RANKS]
        facts = job.strategy.facts
        if facts.shards_state and not facts.shards_parameters:  # ZeRO-1 and 2: gradients stay longest on the last rank
            last_rank = job.world.size - 1
            ranks = [last_rank, *(rank for rank in ranks if rank != last_rank)][:RANKS]
        self._deadline = time.monotonic() + LIMIT_S
        try:
            target = _target(job)
        except ShardkitError as error:
            _LOG.warning("this run is not planned: %s", error)
            return
        arguments = job.config, [replace(target, rank=rank) for rank in ranks], run_dir
        self._thread = threading.Thread(target=self._plan, args=arguments, daemon=True)
        self._thread.start()

    def explain(self, job: Job) -> None:
        """Let a post-mortem of the job plan changes of its config, where `memory.plan` would plan the job itself."""
        setting = job.config.memory.plan
        if setting is True or (setting == "auto" and job.world.device.type == "cuda"):
            run_dir = Path(job.config.run.dir)
            if job.world.is_main:
                (run_dir / CLAIM).unlink(missing_ok=True)
            job.post_mortem.planned = lambda: planned_advice(job.config, _target(job), run_dir)

    def wait(self, config: RunConfig) -> None:
        """Wait for a plan that `memory.plan=true` asked for; an `auto` plan is not waited for."""
        if config.memory.plan is True and self._thread is not None:
            self._thread.join(max(0.0, self._deadline - time.monotonic()) + _STOP_S)  # a failed plan then says why

    def close(self, config: RunConfig, run_dir: Path) -> None:
        """If there is a plan, show it beside the run's measurements."""
        self.wait(config)
        if (run_dir / "plan.json").exists():
            planned.close(run_dir)

    def _plan(self, config: RunConfig, targets: list[Target], run_dir: Path) -> None:
        limit = threading.Timer(LIMIT_S, self._stop)
        limit.daemon = True
        limit.start()
        estimates: list[MemoryEstimate] = []
        try:
            for target in targets:
                with Planner(target, niceness=19) as self._planner:
                    if self._stopped:
                        raise ShardkitError("it was stopped", "")
                    estimates.append(self._planner.predict(config))
                estimates[0].save(run_dir, config, estimates[1:])
                if len(estimates) == 1:
                    print(f"plan: {describe(estimates[0])}", flush=True)
        except (ShardkitError, OSError, ValueError) as error:
            late = time.monotonic() >= self._deadline
            if not self._over:
                reason = f"not ready after {LIMIT_S:g} s" if late else str(error).partition("\n")[0]
                _LOG.warning("this run is not%s planned: %s", " fully" if estimates else "", reason)
        finally:
            limit.cancel()

    def _stop(self) -> None:
        self._stopped = True
        if self._planner is not None:
            self._planner.stop()


def describe(estimate: MemoryEstimate) -> str:
    if estimate.device_memory is None:
        return f"{gib(estimate.needed)} predicted"
    on = "" if estimate.device == "cpu" else " on each GPU"
    verdict = f"{estimate.verdict}{estimate.condition}"
    return f"{gib(estimate.needed)} of {gib(estimate.device_memory)}{on} predicted ({verdict})"


def planned_advice(config: RunConfig, target: Target, run_dir: Path) -> list[Advice]:
    """Planned changes of a job that ran out of memory, those that fit first; only on the first rank that asks."""
    try:
        (run_dir / CLAIM).touch(exist_ok=False)
    except OSError:
        return []
    print(f"shardkit: planning changes that would make room, {LIMIT_S:g} s at most", file=sys.stderr, flush=True)
    with Planner(target) as planner, planner.stopping_after(LIMIT_S):
        changes = changes_that_fit(config, planner.predict(config), planner)
    return [
        Advice(
            change.settings, change.saving, change.cost, f"planned: {gib(change.estimate.needed)}, {verdict}", verdict
        )
        for change in changes
        if (verdict := change.estimate.verdict) is not None
    ]


def _forget_another(path: Path, config: RunConfig, world_size: int) -> None:
    """Delete a plan that an earlier run left, unless it is for this config and world size."""
    try:
        plan = json.loads(path.read_text())
        same = plan["config"] == digest(config) and plan["ranks"][0]["world_size"] == world_size
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        same = False
    if not same:
        path.unlink(missing_ok=True)


def _target(job: Job) -> Target:
    """The job's own world and card."""
    world = job.world
    return target_of(world.device, world.size, world.env.local_world_size, job.config.memory.cap_bytes)


def target_of(device: torch.device, world_size: int, local_world_size: int, cap: int | None) -> Target:
    """The ranks that run now, on the card that they use; `cap` limits a rank further, in bytes."""
    if device.type != "cuda":
        return Target(world_size, None, local_world_size, cap=cap)
    properties = torch.cuda.get_device_properties(device)
    table = {gpu.device_name: gpu for gpu in GPUS.values()}
    card = replace(
        table.get(properties.name) or replace(GPUS[DEFAULT], name=properties.name, device_name=properties.name),
        memory=min(int(properties.total_memory), cap or sys.maxsize),
        capability=(properties.major, properties.minor),
        multiprocessors=int(properties.multi_processor_count),
    )
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    growing = "expandable_segments:True" in settings
    return Target(world_size, known_here(card, world_size), local_world_size, expandable=growing)
