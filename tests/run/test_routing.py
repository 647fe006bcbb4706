"""Rows an expert: counted in every layer, the same whatever ranks share."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.run.job import start
from shardkit.run.routing import Routing
from shardkit.run.trainer import Trainer
from tests.parallel.context_runs import hf
from tests.ranks import run_ranks

ALONE: Any = SimpleNamespace(size=1, rank=0, experts=None, sum=lambda values: values)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Experts(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.num_experts, self.weight = n, nn.Parameter(torch.zeros(n, 2, 2))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden


def test_rows_are_compared_within_a_layer_and_evaluations_do_not_count() -> None:
    model = nn.ModuleDict({"a": Experts(4), "b": Experts(2)})
    routing, rows, weights = Routing(model), torch.zeros(3, 2), torch.ones(3, 2)
    assert routing.take(ALONE) == ({}, {}), "no step was taken"
    for _ in range(2):
        model["a"](rows, torch.tensor([[0, 1], [0, 3], [0, 1]]), weights)
        model["b"](rows, torch.tensor([[0, 0], [0, 0], [1, 0]]), weights)
    model["b"](rows, torch.tensor([[2, -1], [2, 99], [-9, 2]]), weights)  # of no expert
    with torch.no_grad():
        model["b"](rows, torch.tensor([[1, 1], [1, 1], [1, 1]]), weights)
    figures, loads = routing.take(ALONE)
    assert loads == {"a": [2.0, 1.333, 0.0, 0.667], "b": [1.667, 0.333]}
    assert figures == {"busiest_expert": 2.0, "starved_experts": 1}
    assert routing.take(ALONE) == ({}, {})


def trained(
    cases: dict[str, dict[str, Any]], folder: str
) -> dict[str, tuple[list[dict[str, float]], dict[str, Any] | None]]:
    """Case → (records of the steps, the file of each expert's rows)."""
    results = {}
    for name, settings in cases.items():
        data_ranks = dist.get_world_size() // settings.get("parallel.cp", 1) // settings.get("parallel.tp", 1)
        full = {
            **hf("qwen3_moe", **EXPERTS), "run.dir": f"{folder}/{name}", "run.device": "cpu", "train.max_steps": 4,
            "train.eval_samples": 0, "train.seq_len": 24, "train.micro_batch_size": 8 // data_ranks,
            "train.grad_accum_steps": 2, "memory.interval": 2, "optim.name": "sgd", **settings,
        }  # fmt: skip
        with start(None, full) as job:
            records = list(Trainer(job).steps())
        file = Path(folder, name, "experts.json")
        dist.barrier()
        results[name] = records, json.loads(file.read_text()) if file.exists() else None
    return results


FSDP = {"parallel.strategy": "fsdp"}
SHARED = {
    "ddp": {"parallel.strategy": "ddp"},
    "zero3": {"parallel.strategy": "zero3"},
    "ep 2": {**FSDP, "parallel.ep": 2},
    "ep 4, recomputed": {**FSDP, "parallel.ep": 4, "activation.policy": "full"},
    "ep 2, cp 2": {**FSDP, "parallel.ep": 2, "parallel.cp": 2},
    "ep 4, tp 2": {**FSDP, "parallel.ep": 4, "parallel.tp": 2},
}


@pytest.mark.slow
@pytest.mark.dist
def test_experts_get_the_rows_that_they_get_in_one_process(tmp_path: Path) -> None:
    cases, folder = {"alone": {"parallel.strategy": "single"}}, str(tmp_path)
    (alone,) = run_ranks(1, "tests.run.test_routing:trained", cases=cases, folder=folder)
    records, expected = alone["alone"]
    assert [step["step"] for step in records if "busiest_expert" in step] == [1, 2, 4]
    assert not any("ep_peak" in step for step in records)
    assert expected is not None and expected["step"] == 4
    assert all(sum(loads) == pytest.approx(8, abs=0.01) for loads in expected["loads"].values())
    assert records[-1]["busiest_expert"] == max(load for loads in expected["loads"].values() for load in loads)
    found, *_ = run_ranks(4, "tests.run.test_routing:trained", cases=SHARED, folder=folder)
    for name, (steps, file) in found.items():
        for step, expected_step in zip(steps, records, strict=True):
            for key in ("busiest_expert", "starved_experts"):
                assert step.get(key) == expected_step.get(key), (name, step["step"], key)
            has_ranks = "ep " in name and "busiest_expert" in expected_step
            assert ("ep_peak" in step) == ("ep_busiest_rank" in step) == has_ranks, name
            if has_ranks:
                assert 1 <= step["ep_busiest_rank"] <= step["ep_peak"] <= 4, name
        assert file == expected, name


def test_a_model_without_experts_counts_nothing(tmp_path: Path) -> None:
    cases = {"dense": {**hf("qwen3", head_dim=8), "parallel.strategy": "single"}}
    (found,) = run_ranks(1, "tests.run.test_routing:trained", cases=cases, folder=str(tmp_path))
    records, file = found["dense"]
    assert file is None and not any("busiest_expert" in record for record in records)
