"""On CUDA, over NCCL, every engine gives the losses and the weights of the CPU's single process, however late copies
are and whatever lies in new memory."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkit.activation import checkpoint
from shardkit.config.schema import STRATEGIES
from tests.cuda import gpu_ranks, parity
from tests.cuda.parity import Case, problems
from tests.emulated_cuda import needs_emulation
from tests.ranks import RankError, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), needs_emulation]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def wanted(root: Path) -> dict[str, Any]:
    """What the CPU's single process gives."""
    target = "tests.cuda.parity_ranks:reference"
    return run_ranks(1, target, timeout=280, init_group=False, root=str(root))[0]


AT_ONCE = 40
"""Cases after which ranks are started afresh, so that what one leaves behind cannot hide for ever."""


def run(todo: list[Case], root: Path, **env: str) -> dict[Case, dict[str, Any]]:
    """Results by case, many in one set of processes; where ranks fail, each case of theirs has the `error`."""
    found: dict[Case, dict[str, Any]] = {}
    for (world, backend), group in groupby(sorted(todo, key=parity.pool), parity.pool):
        cases = list(group)
        for batch in (cases[first : first + AT_ONCE] for first in range(0, len(cases), AT_ONCE)):
            given = {"todo": batch, "root": str(root), "backend": backend}
            try:
                results = gpu_ranks(
                    world, "tests.cuda.parity_ranks:run", timeout=60 + 20 * len(batch), env=env, **given
                )[0]
            except RankError as error:
                results = [{"error": str(error)}] * len(batch)
            found |= zip(batch, results, strict=True)
    return found


def agree(todo: list[Case], root: Path, wanted: dict[str, Any], **env: str) -> dict[Case, dict[str, Any]]:
    found = run(todo, root, **env)
    wrong = [f"{case}: {problem}" for case in todo for problem in problems(case, found[case], wanted)]
    assert wrong == []
    return found


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


def test_late_copies_and_poisoned_memory_change_nothing(root: Path, wanted: dict[str, Any]) -> None:
    agree(parity.PATHS, root, wanted, **parity.LATE)


@pytest.mark.release
def test_nor_a_bit_in_half_precision(root: Path, wanted: dict[str, Any]) -> None:
    late, plain = agree(parity.HALF, root, wanted, **parity.LATE), run(parity.HALF, root)
    for case in parity.HALF:  # the limits of half precision would hide much
        assert (late[case]["losses"], late[case]["weights"]) == (plain[case]["losses"], plain[case]["weights"]), case


def overwritten() -> int:
    """Elements that a copy has written into memory which was somebody else's by then: nobody wanted it any more."""
    device = torch.device("cuda", torch.cuda.current_device())
    blocks = [nn.Linear(256, 256, device=device) for _ in range(4)]
    offloader = checkpoint.Offloader(device, 0, len(blocks))
    x = torch.randn(2048, 256, device=device, requires_grad=True)
    for index, block in enumerate(blocks):
        x = offloader.forward(index, block, block.forward, torch.tanh(x) if index else x)
    # The third block's backward starts the copies of the second, which this graph is dropped without.
    (_,) = torch.autograd.grad(x.sum(), [blocks[2].weight])
    del x, _
    fresh = [torch.zeros(2048, 256, device=device) for _ in range(12)]
    torch.cuda.synchronize()
    return int(sum(tensor.count_nonzero() for tensor in fresh))


def test_a_copy_that_nobody_waits_for_writes_to_nobody_elses_memory() -> None:
    env = {"EMUCUDA_COPY_DELAY_US": "400000"}
    assert gpu_ranks(1, f"{__name__}:overwritten", env=env) == [0]  # without `record_stream` it is more
