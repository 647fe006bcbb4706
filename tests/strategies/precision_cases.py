"""What the ranks of test_precision.py, test_ema.py and test_optimizers.py run."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardkit.config.schema import PrecisionConfig
from shardkit.parallel.precision import loss_scaler, to_device
from shardkit.run.checks import count_dtypes
from shardkit.run.job import start
from shardkit.strategies.base import StepRequest
from tests.strategies import cases

Curve = list[tuple[float, float]]


def settings(name: str, world: int, optimizer: str = "adamw_clipped", **extra: Any) -> dict[str, Any]:
    return cases.overrides(name, world, optimizer) | extra


def curves(names: list[str], extra: dict[str, Any], steps: int = 4) -> dict[str, Curve]:
    """Losses and norms of each strategy under `extra` settings."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: cases.train(settings(name, world) | extra, rank, world, steps) for name in names}


def types(names: list[str], extra: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Bytes of state by category and type after two steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = {}
    for name in names:
        with start(None, settings(name, world) | extra) as job:
            cases.wrap(job)
            for step in range(2):
                job.step(cases.micro_batches(step, rank, world), cases.loss_fn, cases.n_targets)
            out[name] = count_dtypes(job.strategy)
        gc.collect()
    return out


def scaled(names: list[str], overflow_at: int, steps: int = 5) -> dict[str, Any]:
    """(curve, scales, weights' sums) of fp32 runs scaled as fp16 is; one rank's gradient overflows once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = PrecisionConfig(mode="fp16", loss_scale_init_power=10, loss_scale_window=3)
    out: dict[str, Any] = {}
    for name in names:
        with start(None, settings(name, world)) as job:
            if overflow_at >= 0:
                job.strategy._scaler = loss_scaler(config, torch.device("cpu"))  # type: ignore[attr-defined]
            cases.wrap(job)
            if overflow_at >= 0:  # the CPU has no fp16, but from here on this is how the job takes an overflow
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
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * (float("inf") if ctx.bad else 1.0), None


def averages(names: list[str], decay: float, steps: int = 4) -> dict[str, Any]:
    """(sum and square sum of every averaged weight, loss with averages, loss of the next step) of each strategy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = {}
    for name in names:
        with start(None, settings(name, world) | {"train.ema_decay": decay}) as job:
            cases.wrap(job)
            for step in range(steps):
                job.step(cases.micro_batches(step, rank, world), cases.loss_fn, cases.n_targets)
            local: dict[str, tuple[float, float]] = {}
            for shard in job.strategy.shards():
                if shard.name.startswith("ema.") and shard.replica == 0:
                    values = shard.local.double()
                    before = local.get(shard.name, (0.0, 0.0))
                    local[shard.name] = (before[0] + float(values.sum()), before[1] + float(values.square().sum()))
            with torch.no_grad(), job.strategy.evaluating():
                judged = held_out(job.model, rank, world)
            with torch.no_grad():
                plain = held_out(job.model, rank, world)
            after = job.step(cases.micro_batches(steps, rank, world), cases.loss_fn, cases.n_targets).loss
            out[name] = (local, judged, plain, after)
        gc.collect()
    return out


def averaged(names: list[str], decay: float = 0.5) -> dict[str, tuple[int, int, int]]:
    """(weights of the model, elements of averages that this rank keeps, times a step looked at all of the state)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = {}
    for name in names:
        with start(None, settings(name, world) | {"train.ema_decay": decay}) as job:
            cases.wrap(job)
            job.step(cases.micro_batches(0, rank, world), cases.loss_fn, cases.n_targets)
            kept = sum(s.local.numel() for s in job.strategy.load_targets() if s.name.startswith("ema."))
            whole = sum(getattr(p, "ds_numel", p.numel()) for p in job.model.parameters())
            looked: list[str] = []
            for verb in ("shards", "load_targets"):
                look = getattr(job.strategy.inner, verb)  # type: ignore[attr-defined]
                seen = partial(lambda out, verb, look: out.append(verb) or look(), looked, verb, look)
                setattr(job.strategy.inner, verb, seen)  # type: ignore[attr-defined]
            job.step(cases.micro_batches(1, rank, world), cases.loss_fn, cases.n_targets)
            out[name] = whole, kept, len(looked)
        gc.collect()
    return out


def skipped(names: list[str]) -> dict[str, tuple[bool, bool, float]]:
    """Of a step that loss scaling skips: whether averages and weights stayed, and the scale after it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = PrecisionConfig(mode="fp16", loss_scale_init_power=1)
    out = {}
    for name in names:
        with start(None, settings(name, world) | {"train.ema_decay": 0.5}) as job:
            cases.wrap(job)
            job.step(cases.micro_batches(0, rank, world), cases.loss_fn, cases.n_targets)  # weights leave the averages
            scaler = loss_scaler(config, torch.device("cpu"))
            scaler.scale(torch.ones(()))  # as a backward does first
            job.strategy.inner._scaler = scaler  # type: ignore[attr-defined]
            before = {s.name: s.local.clone() for s in job.strategy.load_targets()}
            for param in job.model.parameters():
                param.grad = torch.full_like(param, float("inf"))
            job.strategy.step(StepRequest())
            stayed = {s.name: torch.equal(s.local, before[s.name]) for s in job.strategy.load_targets()}
            averages = all(same for name, same in stayed.items() if name.startswith("ema."))
            weights = all(same for name, same in stayed.items() if name.startswith("model."))
            out[name] = averages, weights, job.strategy.loss_scale()
        gc.collect()
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
    for name in names:
        for mode in modes:
            for policy in policies:
                for accum in (1, 2):
                    extra: dict[str, Any] = {
                        "precision.mode": mode, "activation.policy": policy, "run.device": device
                    }  # fmt: skip
                    if policy == "every_k":
                        extra["activation.every_k"] = 2
                    extra["train.grad_accum_steps"] = accum
                    extra["train.micro_batch_size"] = cases.GLOBAL_BATCH // accum // world
                    with start(None, settings(name, world) | extra) as job:
                        cases.wrap(job)
                        curve = []
                        for step in range(steps):
                            micro = [
                                to_device(b, job.world.device) for b in cases.micro_batches(step, rank, world, accum)
                            ]
                            curve.append(job.step(micro, cases.loss_fn, cases.n_targets).loss)
                    gc.collect()
                    out[name, mode, policy, accum] = curve
    return out


def averages_through_a_checkpoint(root: str, saver: str, loaders: list[str]) -> dict[str, dict[str, float]]:
    """Square sums on this rank of what `saver` wrote and each loader read, `ema.` and `model.` apart."""
    from shardkit.checkpoint.native.manifest import RunState
    from shardkit.checkpoint.save import Checkpointer

    rank, world = dist.get_rank(), dist.get_world_size()
    out = {}
    for name in [saver, *loaders]:
        with start(None, settings(name, world) | {"train.ema_decay": 0.5}) as job:
            cases.wrap(job)
            checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, root, timeout_s=60)
            if name == saver:
                for step in range(3):
                    job.step(cases.micro_batches(step, rank, world), cases.loss_fn, cases.n_targets)
                checkpoints.save(RunState(step=3, seed=0))
            else:
                assert checkpoints.resume(root) is not None
            sums: dict[str, float] = {}
            for shard in job.strategy.shards():
                if shard.replica == 0 and shard.name.startswith(("ema.", "model.")):
                    sums[shard.name] = sums.get(shard.name, 0.0) + float(shard.local.double().square().sum())
            out[name] = sums
            checkpoints.close()
        gc.collect()
    return out


def resumed_curve(root: str, extra: dict[str, Any]) -> tuple[Curve, Curve]:
    """Steps 3 to 5 of a run that went through, and of one that was saved after step 3 and resumed."""
    from shardkit.checkpoint.native.manifest import RunState
    from shardkit.checkpoint.save import Checkpointer

    rank, world = dist.get_rank(), dist.get_world_size()
    name = "single" if world == 1 else "ddp"
    curves: list[Curve] = []
    for resume in (False, True):
        with start(None, settings(name, world) | extra) as job:
            cases.wrap(job)
            checkpoints = Checkpointer(job.strategy, job.world, job.config.checkpoint, root, timeout_s=60)
            if resume:
                assert checkpoints.resume(root) is not None
            curve = []
            for step in range(3 if resume else 0, 6):
                result = job.step(cases.micro_batches(step, rank, world), cases.loss_fn, cases.n_targets)
                curve.append((result.loss, result.grad_norm))
                if step == 2:
                    checkpoints.save(RunState(step=3, seed=0))
            curves.append(curve[-3:])
            checkpoints.close()
        gc.collect()
    return curves[0], curves[1]
