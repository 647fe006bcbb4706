"""`shardkit.watch` around loops that know nothing of it: every rank's bytes, a run directory, a post-mortem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.memory import read_jsonl
from shardkit.report.read import read_run
from tests.ranks import run_ranks

SIZE, STEP_COUNT = 64, 4
NUMEL = 2 * (SIZE * SIZE + SIZE)
KINDS = ("params", "master_params", "grads", "optimizer")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))


def batches(steps: int, accum: int = 2) -> Iterator[tuple[torch.Tensor, bool]]:
    """Inputs, and whether the update follows."""
    for index in range(steps * accum):
        yield torch.ones(4, SIZE), (index + 1) % accum == 0


def torch_loop(model: nn.Module, optimizer: Any, steps: int, log: Callable[..., None] = lambda **_: None) -> None:
    for inputs, is_last in batches(steps):
        loss = model(inputs).pow(2).mean()
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            log(loss=loss)


def loop_of(kind: str, folder: Path) -> dict[str, Any]:
    """A user's loop of one kind under `watch`; the counted bytes and what the run directory says."""
    model = make_model()
    optimizer: Any = None
    if kind.startswith("zero"):
        import deepspeed

        zero = {"stage": int(kind[-1]), "stage3_param_persistence_threshold": 0}
        settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": zero}
        own = torch.optim.AdamW(model.parameters())
        more = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        model, *_ = deepspeed.initialize(model=model, optimizer=own, config=settings | more, dist_init_required=False)
    else:
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind == "fsdp":
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    with shardkit.watch(model, optimizer, run_dir=folder / kind, every=2) as watching:
        if optimizer is None:
            for inputs, _ in batches(5):
                loss = model(inputs).pow(2).mean()
                model.backward(loss)
                model.step()
                watching.log(loss=loss)
        else:
            torch_loop(model, optimizer, 5, watching.log)
    gathers = list(read_jsonl(folder / kind / "memory.jsonl")) if dist.get_rank() == 0 else []
    if kind.startswith("zero"):
        model.destroy()
    return {
        "steps": [step for step, _ in gathers],
        "ranks": [{k: row.state[k].device for k in KINDS} for row in gathers[-1][1]] if gathers else [],
        "phases": [sorted(row.phases) for row in gathers[-1][1]] if gathers else [],
    }


def loops(kinds: list[str], folder: str) -> dict[str, Any]:
    return {kind: loop_of(kind, Path(folder)) for kind in kinds}


EXPECTED = {
    "ddp": {"params": 4 * NUMEL, "master_params": 0, "grads": 4 * NUMEL, "optimizer": 8 * NUMEL + 4 * STEP_COUNT},
    "fsdp": {"params": 2 * NUMEL, "master_params": 0, "grads": 2 * NUMEL, "optimizer": 4 * NUMEL + 4 * STEP_COUNT},
    "zero1": {"params": 4 * NUMEL, "master_params": 2 * NUMEL, "grads": 2 * NUMEL, "optimizer": 4 * NUMEL + STEP_COUNT},
    "zero2": {"params": 4 * NUMEL, "master_params": 2 * NUMEL, "grads": 2 * NUMEL, "optimizer": 4 * NUMEL + STEP_COUNT},
    "zero3": {"params": 2 * NUMEL, "master_params": 2 * NUMEL, "grads": 2 * NUMEL, "optimizer": 4 * NUMEL + STEP_COUNT},
}


@pytest.mark.dist
@pytest.mark.deepspeed
def test_every_ranks_state_is_counted_to_the_byte_whatever_engine_the_loop_has(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.run.test_watching:loops", kinds=list(EXPECTED), folder=str(tmp_path))[0]
    for kind, expected in EXPECTED.items():
        assert found[kind]["steps"] == [1, 2, 4, 5], kind
        assert found[kind]["ranks"] == [expected, expected], kind
        assert found[kind]["phases"] == [["backward", "forward", "step"]] * 2, kind
        run = read_run(tmp_path / kind)
        assert run.notes == [] and run.setting("parallel.strategy") == kind
        assert (run.setting("train.micro_batch_size"), run.setting("train.grad_accum_steps")) == (4, 2)
        assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5]
        assert all(line["loss"] > 0 and line["lr"] == 1e-3 for line in run.metrics)
