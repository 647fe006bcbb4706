"""Under every strategy each policy and offload give the losses and gradient norms of keeping everything, dropout on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch.distributed as dist

from shardkit.run.job import start
from tests.ranks import run_ranks
from tests.strategies import cases

KEEP = "none"
TECHNIQUES: dict[str, dict[str, Any]] = {
    KEEP: {},
    "full": {"activation.policy": "full"},
    "selective+offload": {"activation.policy": "selective", "activation.offload": "cpu"},
    "full+offload": {"activation.policy": "full", "activation.offload": "cpu"},
    "selective_op+offload": {"activation.policy": "selective_op", "activation.offload": "cpu"},
}


def curves(strategies: list[str], precision: str) -> dict[str, dict[str, Any]]:
    """strategy → technique → (loss, gradient norm) of each step, with bytes of device state after the last."""
    model = cases.MODEL.model_copy(update={"dropout": 0.1, "n_layers": 5})
    rank, world = dist.get_rank(), dist.get_world_size()
    out: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        for name, technique in TECHNIQUES.items():
            extra = {"precision.mode": precision, **technique}
            if "activation.offload" in technique:
                extra["activation.offload_min_bytes"] = 0
            with start(None, cases.overrides(strategy, world, "adamw_clipped", **extra)) as job:
                cases.wrap(job, model)
                steps = [job.step(cases.micro_batches(i, rank, world), cases.loss_fn, cases.n_targets) for i in (0, 1)]
                state = cases.count_storages(job.strategy.state_tensors())
            gc.collect()
            out.setdefault(strategy, {})[name] = [(step.loss, step.grad_norm) for step in steps], state
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategies", "precision"),
    [
        (["ddp", "zero2"], "fp32"), (["fsdp", "zero3"], "fp32"),
        pytest.param(["hsdp", "zero1"], "fp32", marks=pytest.mark.release),
        pytest.param(["ddp", "fsdp", "zero2", "zero3"], "bf16", marks=pytest.mark.release),
    ],
)  # fmt: skip
def test_losses_and_norms_are_those_of_keeping_everything(strategies: list[str], precision: str) -> None:
    ranks = run_ranks(2, f"{__name__}:curves", timeout=400, strategies=strategies, precision=precision)
    for strategy, results in ranks[0].items():
        for name, result in results.items():
            assert result == results[KEEP], (strategy, name)
