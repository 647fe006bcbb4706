"""What the ranks of test_precision.py, test_ema.py and test_optimizers.py run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.config.schema import PrecisionConfig
from shardkit.memory.probe import local_tensors
from shardkit.memory.rows import KINDS
from shardkit.parallel.precision import loss_scaler
from shardkit.run.job import Job, StepResult, start
from shardkit.strategies import Strategy
from shardkit.strategies.base import StepRequest
from tests.strategies import cases


def jobs(names: list[str], **extra: Any) -> Iterator[tuple[str, Job]]:
    """A job of each strategy in turn, with the cases' model and `extra` settings."""
    for name in names:
        with start(None, cases.overrides(name, dist.get_world_size(), **extra)) as job:
            cases.wrap(job)
            yield name, job
        gc.collect()


def step(job: Job, number: int) -> StepResult:
    batches = cases.micro_batches(number, job.world.rank, job.world.size)
    return job.step(batches, cases.loss_fn, cases.n_targets)


def count_dtypes(strategy: Strategy) -> dict[str, dict[str, int]]:
    """This rank's bytes of each category of state by dtype; a storage counts once, whole."""
    n_bytes: dict[str, dict[str, int]] = {}
    seen: set[int] = set()
    for kind in KINDS:
        for of, tensor in strategy.state_tensors():
            if of != kind:
                continue
            for local in local_tensors(tensor):
                storage = local.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    by_type, name = n_bytes.setdefault(kind, {}), str(local.dtype).removeprefix("torch.")
                    by_type[name] = by_type.get(name, 0) + storage.nbytes()
    return n_bytes


def types(names: list[str], extra: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes of state by category and type after two steps."""
    out = {}
    for name, job in jobs(names, **extra):
        for number in range(2):
            step(job, number)
        out[name] = count_dtypes(job.strategy)
    return out


def scaled(names: list[str], overflow_at: int, steps: int = 5) -> dict[str, Any]:
    """(curve, scales, weights' sums) of fp32 runs scaled as fp16 is; one rank's gradient overflows once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = PrecisionConfig(mode="fp16", loss_scale_init_power=10, loss_scale_window=3)
    out: dict[str, Any] = {}
    for name in names:
        with start(None, cases.overrides(name, world)) as job:
            job.strategy._scaler = loss_scaler(config, torch.device("cpu"))
            cases.wrap(job)
            # The CPU has no fp16, but from here on this is how the job takes an overflow.
            job.config.__dict__["precision"] = config
            curve, scales, weights = [], [], []
            for step in range(steps):
                overflowing = step == overflow_at and rank == world - 1
                result = job.step(
                    cases.micro_batches(step, rank, world),
                    lambda model, batch, bad=overflowing: Overflow.apply(cases.loss_fn(model, batch), bad),
                    cases.n_targets,
                )
                curve.append((result.loss, result.grad_norm))
                scales.append(job.strategy.loss_scale())
                weights.append([float(s.local.double().sum()) for s in job.strategy.shards() if s.name[:6] == "model."])
            out[name] = (curve, scales, weights, job.strategy.scalars())
        gc.collect()
    return out


class Overflow(torch.autograd.Function):
    """The identity, whose gradient is infinite when asked."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * (float("inf") if ctx.bad else 1.0), None


def averages(names: list[str], decay: float, steps: int = 4) -> dict[str, Any]:
    """Of each strategy: (sum, square sum) of every averaged weight, losses with averages and without them,
    the loss of the next step, and how many elements this rank averages of how many."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = {}
    for name, job in jobs(names, **{"train.ema_decay": decay}):
        for number in range(steps):
            step(job, number)
        local: dict[str, tuple[float, float]] = {}
        for shard in job.strategy.shards():
            if shard.name.startswith("ema.") and shard.replica == 0:
                values = shard.local.double()
                before = local.get(shard.name, (0.0, 0.0))
                local[shard.name] = (before[0] + float(values.sum()), before[1] + float(values.square().sum()))
        kept = sum(shard.local.numel() for shard in job.strategy.load_targets() if shard.name.startswith("ema."))
        whole = sum(getattr(p, "ds_numel", p.numel()) for p in job.model.parameters())
        with torch.no_grad(), job.strategy.evaluating():
            judged = held_out(job.model, rank, world)
        with torch.no_grad():
            plain = held_out(job.model, rank, world)
        out[name] = (local, judged, plain, step(job, steps).loss, (kept, whole))
    return out


def skipped(names: list[str]) -> dict[str, tuple[bool, bool, float]]:
    """Of a step that loss scaling skips: whether averages and weights stayed, and the scale after it."""
    out = {}
    for name, job in jobs(names, **{"train.ema_decay": 0.5}):
        step(job, 0)  # weights leave the averages
        scaler = loss_scaler(PrecisionConfig(mode="fp16", loss_scale_init_power=1), torch.device("cpu"))
        scaler.scale(torch.ones(()))  # as a backward does first
        job.strategy.inner._scaler = scaler
        before = {s.name: s.local.clone() for s in job.strategy.load_targets()}
        for param in job.model.parameters():
            param.grad = torch.full_like(param, float("inf"))
        job.strategy.step(StepRequest(job.config))
        stayed = {s.name: torch.equal(s.local, before[s.name]) for s in job.strategy.load_targets()}
        averages, weights = (
            all(same for name, same in stayed.items() if name.startswith(kind)) for kind in ("ema.", "model.")
        )
        out[name] = averages, weights, job.strategy.loss_scale()
    return out


def held_out(model: torch.nn.Module, rank: int, world: int) -> float:
    """Loss of one batch over all ranks."""
    total = torch.zeros(())
    for batch in cases.micro_batches(99, rank, world):
        total += cases.loss_fn(model, batch).float()
    dist.all_reduce(total)
    return float(total)


def matrix(
    names: list[str], modes: list[str], policies: list[str], steps: int = 4, device: str = "cpu"
) -> dict[tuple[str, str, str, int], list[float]]:
    """Losses by (strategy, precision, activation policy, accumulation); the same samples in every step."""
    if not dist.is_initialized():  # one group for all: DeepSpeed keeps those that it made of it
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    out = {}
    for name, mode, policy, accum in product(names, modes, policies, (1, 2)):
        extra: dict[str, Any] = {
            "precision.mode": mode, "activation.policy": policy, "run.device": device, "train.grad_accum_steps": accum,
            "train.micro_batch_size": cases.GLOBAL_BATCH // accum // world,
        }  # fmt: skip
        if policy == "every_k":
            extra["activation.every_k"] = 2
        curve = cases.train(cases.overrides(name, world, **extra), rank, world, steps)
        out[name, mode, policy, accum] = [loss for loss, _ in curve]
    return out


def averages_through_a_checkpoint(root: str, saver: str, loaders: list[str]) -> dict[str, dict[str, float]]:
    """Square sums on this rank of what `saver` wrote and each loader read, `ema.` and `model.` apart."""
    out = {}
    for name, job in jobs([saver, *loaders], **{"train.ema_decay": 0.5}):
        checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, root, timeout_s=60)
        if name == saver:
            for number in range(3):
                step(job, number)
            checkpoints.save(RunState(step=3, seed=0))
        else:
            assert checkpoints.resume(root) is not None
        sums: dict[str, float] = {}
        for shard in job.strategy.shards():
            if shard.replica == 0 and shard.name.startswith(("ema.", "model.")):
                sums[shard.name] = sums.get(shard.name, 0.0) + float(shard.local.double().square().sum())
        out[name] = sums
        checkpoints.close()
    return out


def resumed_curve(root: str, extra: dict[str, Any]) -> tuple[cases.Curve, cases.Curve]:
    """Steps 3 to 5 of a run that went through, and of one that was saved after step 3 and resumed."""
    curves: list[cases.Curve] = []
    for _, job in jobs(["ddp", "ddp"], **extra):
        checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, root, timeout_s=60)
        if curves:
            assert checkpoints.resume(root) is not None
        curve = []
        for number in range(3 if curves else 0, 6):
            result = step(job, number)
            curve.append((result.loss, result.grad_norm))
            if number == 2:
                checkpoints.save(RunState(step=3, seed=0))
        curves.append(curve[-3:])
        checkpoints.close()
    return curves[0], curves[1]
