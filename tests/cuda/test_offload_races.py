"""Offload and prefetch with late copies and poisoned new memory: nothing is read before it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.activation import checkpoint
from tests.cuda import gpu_ranks, pools
from tests.cuda.parity import HALF, LATE, PATHS, problems
from tests.emulated_cuda import needs_emulation

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.deepspeed, pytest.mark.timeout(900), needs_emulation]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("races")


@pytest.fixture(scope="module")
def wanted(root: Path) -> dict[str, Any]:
    return pools.reference(root)


def test_late_copies_and_poisoned_memory_change_nothing(root: Path, wanted: dict[str, Any]) -> None:
    found = pools.run(PATHS, root, **LATE)
    assert [f"{case}: {p}" for case in PATHS for p in problems(case, found[case], wanted)] == []


@pytest.mark.release
def test_nor_a_bit_in_half_precision(root: Path, wanted: dict[str, Any]) -> None:
    late = pools.run(HALF, root, **LATE)
    assert [f"{case}: {p}" for case in HALF for p in problems(case, late[case], wanted)] == []
    plain = pools.run(HALF, root)
    for case in HALF:  # the limits of half precision would hide much
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
