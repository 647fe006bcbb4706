"""On CUDA, over NCCL, every engine gives the losses and the weights of the CPU's single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.config.schema import STRATEGIES
from tests.cuda import gpu_ranks, parity, pools
from tests.cuda.parity import Case, problems
from tests.emulated_cuda import needs_emulation
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.deepspeed, pytest.mark.timeout(900), needs_emulation]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def wanted(root: Path) -> dict[str, Any]:
    return pools.reference(root)


def agree(todo: list[Case], root: Path, wanted: dict[str, Any]) -> None:
    found = pools.run(todo, root)
    wrong = [f"{case}: {problem}" for case in todo for problem in problems(case, found[case], wanted)]
    assert wrong == []


QUICK = [
    Case("single@1", "fp16", "selective", overflow=True),
    Case("single@1", "fp8", "full", accum=1),
    Case("single@1", "pure_bf16", "selective_op", offload=True, ema=True),
    Case("ddp@2", ema=True, optimizer="sgd_unclipped"),
    Case("ddp@2", "fp16", "every_k", overflow=True, accum=3),
    Case("fsdp@2", policy="selective_op", offload=True, accum=3),
    Case("fsdp@2", "bf16", "full", ema=True),
    Case("zero1@2", "fp16", "full", overflow=True, ema=True),
    Case("zero2@2", "bf16", "selective"),
    Case("zero3@2", policy="full", offload=True, ema=True),
    Case("zero3@2", "fp16", overflow=True, accum=1),
    Case("zero3:hpz@4", accum=1),
    Case("hsdp@4", "bf16", "full", accum=3),
    Case("hsdp@4", policy="every_k", optimizer="sgd_unclipped"),
]


def test_every_engine_agrees_with_the_cpu(root: Path, wanted: dict[str, Any]) -> None:
    assert {case.strategy for case in QUICK} == set(STRATEGIES)
    agree(QUICK, root, wanted)


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_every_pair_of_techniques_agrees_with_the_cpu(root: Path, wanted: dict[str, Any]) -> None:
    agree(parity.covering(), root, wanted)


def statistics(strategies: list[str]) -> Any:
    from tests.cuda.parity_ranks import join
    from tests.tasks import special

    join("nccl")
    return special.outcomes(strategies, device="cuda")


def test_batch_norm_over_all_ranks_agrees_with_the_cpu() -> None:
    one = run_ranks(1, "tests.tasks.special:outcomes", strategies=["single"])[0]["single"]
    strategies = ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
    for rank in gpu_ranks(2, f"{__name__}:statistics", strategies=strategies):
        for strategy, found in rank.items():
            assert found["losses"] == pytest.approx(one["losses"], abs=1e-5), strategy
            assert found["norms"] == pytest.approx(one["norms"], rel=1e-4), strategy
            assert found["synchronised"] == 2
            for name, value in found["buffers"].items():
                np.testing.assert_allclose(value, one["buffers"][name], atol=1e-5, err_msg=f"{strategy} {name}")
