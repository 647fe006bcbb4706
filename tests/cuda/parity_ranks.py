"""What the ranks of a parity case run, on CUDA or as the CPU's single process, and what they report."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from shardkit.run.job import Job, start
from tests.cuda.parity import Case
from tests.cuda.steady import elsewhere
from tests.strategies import cases
from tests.strategies.precision_cases import Overflow

STEPS, OVERFLOW_AT = 8, 3


def join(backend: str) -> None:
    """The group of all ranks; bound to its device where shardkit itself would bind it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    bound = backend == "nccl" and world > 1
    dist.init_process_group(
        backend, init_method=f"file://{os.environ['RANKS_STORE']}", rank=rank, world_size=world,
        device_id=torch.device("cuda", rank) if bound else None,
    )  # fmt: skip


def train(job: Job, case: Case, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses and loss scales of each step."""
    rank, world = job.world.rank, job.world.size
    losses, scales = [], []
    for step in range(steps):
        batches = cases.micro_batches(step, rank, world, case.accum)
        bad = case.overflow and step == OVERFLOW_AT and rank == world - 1
        if bad and case.mode != "fp16":  # the reference, one process: without loss scaling nothing skips the step
            with torch.no_grad():
                total = sum(cases.loss_fn(job.model, batch).item() for batch in batches)
            losses.append(total / sum(map(cases.n_targets, batches)))
            scales.append(1.0)
            continue
        result = job.step(
            batches, lambda model, batch, bad=bad: Overflow.apply(cases.loss_fn(model, batch), bad), cases.n_targets
        )
        losses.append(result.loss)
        scales.append(job.strategy.loss_scale())
    return losses, scales


def reference(root: str) -> dict[str, Any]:
    """The CPU's single process: weights to root/NAME.pt, losses by name; how far its own bf16 lies from its fp32."""
    out: dict[str, Any] = {"losses": {}, "spread": {}, "elements": {}}
    for optimizer, offload in product(cases.OPTIMIZERS, (False, True)):
        plain = Case("single@1", optimizer=optimizer, ema=True, offload=offload)
        bf16, pure = replace(plain, mode="bf16"), replace(plain, mode="pure_bf16")
        found = {case: _on_cpu(case) for case in (plain, replace(plain, overflow=True), bf16, pure)}
        for case, (losses, weights) in found.items():
            if case.mode != "bf16":
                torch.save(weights, f"{root}/{case.wanted}.pt")
                out["losses"][case.wanted] = losses
                out["elements"][case.wanted] = sum(weight.numel() for weight in weights.values())
            if case.mode != "fp32":  # what this type is worth in this job
                far = distance(found[plain][1], [(name, 0, tensor) for name, tensor in weights.items()])
                out["spread"][f"{optimizer} {case.layers} {case.mode}"] = {
                    "loss": max(abs(a - b) for a, b in zip(found[plain][0], losses, strict=True)),
                    "weights": (far["square"] / far["norm"]) ** 0.5,
                }  # fmt: skip
    return out


def _on_cpu(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    with start(None, replace(case, offload=False).settings("cpu")) as job:
        wrap(job, case)
        losses, _ = train(job, case)
        weights = {name: local.clone() for name, _, local in held(job)}
    gc.collect()
    return losses, weights


def wrap(job: Job, case: Case) -> None:
    cases.wrap(job, cases.MODEL.model_copy(update={"n_layers": case.layers}))


Held = tuple[str, int, torch.Tensor]
"""Name, first element and values of what a rank holds of a weight, and writes."""


def held(job: Job) -> Iterator[Held]:
    for shard in job.strategy.shards():
        if shard.name.startswith("model.") and shard.replica == 0:
            yield shard.name, shard.start, shard.local


def distance(wanted: dict[str, torch.Tensor], found: Iterable[Held]) -> dict[str, float]:
    """Sums that say how far weights are from those wanted."""
    out = {"square": 0.0, "norm": 0.0, "elements": 0.0}
    for name, first, local in found:
        want = wanted[name][first : first + local.numel()].double()
        out["square"] += float((local.detach().cpu().double() - want).square().sum())
        out["norm"] += float(want.square().sum())
        out["elements"] += local.numel()
    return out


def run(todo: list[Case], root: str, backend: str) -> list[dict[str, Any]]:
    """The result of each case in turn."""
    join(backend)
    out = []
    for case in todo:
        print(case, file=sys.stderr, flush=True)  # where one fails, the last line says which
        found = measure(case, root)
        everyone: list[Any] = [None] * dist.get_world_size()
        gloo = dist.new_group(backend="gloo")
        dist.all_gather_object(everyone, found, group=gloo)
        dist.destroy_process_group(gloo)
        out.append(together(everyone))
    return out


def measure(case: Case, root: str) -> dict[str, Any]:
    with start(None, case.settings()) as job:
        wrap(job, case)
        losses, scales = train(job, case)
        taken_elsewhere = elsewhere()
        found = distance(torch.load(f"{root}/{case.wanted}.pt"), held(job))
    gc.collect()
    torch.use_deterministic_algorithms(False)  # the next case may not ask for it
    return {"losses": losses, "scales": scales, "elsewhere": taken_elsewhere, **found}


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks': they agree on losses, and hold each weight once between them."""
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks), "every rank knows the same loss"
    total = {key: sum(rank[key] for rank in ranks) for key in ("square", "norm", "elements")}
    return {
        "losses": ranks[0]["losses"], "scales": ranks[0]["scales"],
        "elsewhere": sum(rank["elsewhere"] for rank in ranks), "elements": int(total["elements"]),
        "weights": (total["square"] / total["norm"]) ** 0.5 if total["norm"] else float("nan"),
    }  # fmt: skip
