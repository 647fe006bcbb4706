"""Under every strategy each policy and offload give the losses and gradient norms of keeping everything, dropout on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks

STRATEGIES = ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
KEEP = "none"
QUICK: dict[str, dict[str, Any]] = {
    KEEP: {},
    "full": {"activation.policy": "full"},
    "selective+offload": {"activation.policy": "selective", "activation.offload": "cpu"},
    "full+offload": {"activation.policy": "full", "activation.offload": "cpu"},
}
WHOLE: dict[str, dict[str, Any]] = QUICK | {
    "every_k": {"activation.policy": "every_k", "activation.every_k": 2},
    "selective": {"activation.policy": "selective"},
    "selective_op": {"activation.policy": "selective_op"},
    "offload": {"activation.offload": "cpu"},
    "selective_op+offload": {"activation.policy": "selective_op", "activation.offload": "cpu"},
}


def curves(
    strategies: list[str], techniques: dict[str, dict[str, Any]], precision: str, steps: int
) -> dict[str, dict[str, Any]]:
    """strategy → technique → (loss, gradient norm) of each step, with bytes of device state after the last."""
    import torch.distributed as dist

    from tests.strategies import cases

    cases.MODEL = cases.MODEL.model_copy(update={"dropout": 0.1, "n_layers": 5})
    rank, world = dist.get_rank(), dist.get_world_size()
    out: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        for name, technique in techniques.items():
            extra = {"activation.offload_min_bytes": 0} if "activation.offload" in technique else {}
            settings = cases.overrides(
                strategy, world, "adamw_clipped", **technique, **extra, **{"precision.mode": precision}
            )
            out.setdefault(strategy, {})[name] = _run(cases, settings, rank, world, steps)
    return out


def _run(cases: Any, settings: dict[str, Any], rank: int, world: int, steps: int) -> Any:
    import gc

    from shardkit.run.job import start

    with start(None, settings) as job:
        cases.wrap(job, cases.MODEL)
        results = [job.step(cases.micro_batches(i, rank, world), cases.loss_fn, cases.n_targets) for i in range(steps)]
        state = cases.count_storages(job.strategy.state_tensors())
    gc.collect()
    return [(result.loss, result.grad_norm) for result in results], state


def check(got: dict[str, dict[str, Any]]) -> None:
    for strategy, results in got.items():
        for name, result in results.items():
            assert result == results[KEEP], (strategy, name)


slow, release = pytest.mark.slow, pytest.mark.release


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("strategies", "precision", "techniques", "steps"),
    [
        pytest.param(["ddp", "zero2"], "fp32", QUICK, 2, marks=slow, id="ddp+zero2"),
        pytest.param(["fsdp", "zero3"], "fp32", QUICK, 2, marks=slow, id="fsdp+zero3"),
        *(pytest.param([strategy], precision, WHOLE, 3, marks=release, id=f"{strategy} {precision}")
          for strategy in STRATEGIES for precision in ("fp32", "bf16")),
    ],
)  # fmt: skip
def test_losses_and_norms_are_those_of_keeping_everything(
    strategies: list[str], precision: str, techniques: dict[str, dict[str, Any]], steps: int
) -> None:
    given = dict(strategies=strategies, techniques=techniques, precision=precision, steps=steps)
    for strategy, results in run_ranks(2, f"{__name__}:curves", timeout=400, **given)[0].items():
        for name, result in results.items():
            assert result == results[KEEP], (strategy, name)
