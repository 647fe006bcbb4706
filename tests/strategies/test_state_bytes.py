"""Sharded state takes what theory says, to the byte (Rajbhandari et al. 2020, section 3; FSDP2 shards rows).

fp32 everywhere: 4 bytes an element; AdamW keeps two moments; torch adds a 4-byte step count per tensor it updates.
"""

from __future__ import annotations

import pytest
import torch

from shardkit.config.schema import OptimConfig
from shardkit.models.transformer import Transformer
from shardkit.parallel.optim import parameter_groups
from tests.ranks import run_ranks
from tests.strategies import cases

STEP_COUNT = 4
Measured = list[dict[str, dict[str, int]]]
"""Of each rank: engine → kind of state → bytes."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    with torch.device("meta"):
        return Transformer(cases.UNEVEN)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def measured(request: pytest.FixtureRequest) -> Measured:
    names = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
    names += [f"{name} frozen" for name in names] + (["hsdp"] if request.param == 4 else [])
    return run_ranks(request.param, "tests.strategies.cases:state_bytes", names=names)


def test_ddp_keeps_everything_whole(model: Transformer, measured: Measured) -> None:
    numel = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    for rank in measured:
        assert rank["ddp"] == {"params": 4 * numel, "grads": 4 * numel, "optimizer": 8 * numel + STEP_COUNT * tensors}


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_fsdp_keeps_its_rows(name: str, model: Transformer, measured: Measured) -> None:
    if name == "hsdp" and len(measured) < 4:
        pytest.skip("hsdp with two replicas needs 4 ranks")
    shard_ranks = len(measured) if name == "fsdp" else len(measured) // 2
    # Parameters and reduced gradients are padded to ceil(rows / ranks) rows; moments hold the rows alone.
    padded = sum(-(-p.shape[0] // shard_ranks) * (p.numel() // p.shape[0]) for p in model.parameters())
    for index, rank in enumerate(measured):
        own = sum(rows(p, index % shard_ranks, shard_ranks) * (p.numel() // p.shape[0]) for p in model.parameters())
        assert rank[name]["params"] == 4 * padded
        assert rank[name]["grads"] == 4 * padded
        assert rank[name]["optimizer"] == 8 * own + STEP_COUNT * len(list(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero12_keeps_a_flat_partition(name: str, model: Transformer, measured: Measured) -> None:
    world = len(measured)
    for index, rank in enumerate(measured):
        whole = partition = grads = groups = 0
        for group in parameter_groups(OptimConfig(), model):
            numel = sum(p.numel() for p in group["params"])
            padded = -(-numel // (2 * world)) * 2 * world  # DeepSpeed pads each group to a multiple of 2 × world
            whole, partition, groups = whole + padded, partition + padded // world, groups + 1
            grads += zero12_grad_elements(group["params"], padded // world, index)
        sizes = {"params": whole, "master_params": partition, "grads": grads}
        assert rank[name] == four_times(sizes, 8 * partition + STEP_COUNT * groups)


def four_times(sizes: dict[str, int], optimizer: int) -> dict[str, int]:
    return {kind: 4 * numel for kind, numel in sizes.items()} | {"optimizer": optimizer}


def zero12_grad_elements(params: list[torch.Tensor], size: int, index: int) -> int:
    """A partition's gradients: each parameter that reaches into it (one cut by its edge is kept whole), and padding."""
    first, last, at, total = index * size, (index + 1) * size, 0, 0
    for param in params:
        if at < last and at + param.numel() > first:
            total += param.numel()
        at += param.numel()
    return total + max(0, last - max(at, first))


def test_zero3_keeps_a_part_of_each_parameter(model: Transformer, measured: Measured) -> None:
    part = sum(-(-p.numel() // len(measured)) for p in model.parameters())  # each parameter padded to world equal parts
    for rank in measured:
        sizes = dict.fromkeys(("params", "master_params", "grads"), part)
        assert rank["zero3"] == four_times(sizes, 8 * part + STEP_COUNT * 2)


def test_what_is_not_trained_counts_too(measured: Measured) -> None:
    with torch.device("meta"):
        model = cases.partly_frozen()
    frozen, trained = model.tok_emb.weight, [param for param in model.parameters() if param.requires_grad]
    world = len(measured)
    whole = {
        "ddp": sum(param.numel() for param in trained) + frozen.numel(),
        "fsdp": sum(-(-p.shape[0] // world) * (p.numel() // p.shape[0]) for p in (*trained, frozen)),
        "zero3": sum(-(-p.numel() // world) for p in (*trained, frozen)),
    }
    groups = (sum(p.numel() for p in group["params"]) for group in parameter_groups(OptimConfig(), model))
    whole["zero1"] = whole["zero2"] = frozen.numel() + sum(-(-n // (2 * world)) * 2 * world for n in groups)
    for rank in measured:
        assert {name: rank[f"{name} frozen"]["params"] for name in whole} == {n: 4 * whole[n] for n in whole}
        assert {name: rank[f"{name} frozen"].get("buffers") for name in whole} == dict.fromkeys(whole, 4 * cases.BUFFER)


def rows(param: torch.Tensor, rank: int, ranks: int) -> int:
    """Rows of dim 0 on a rank: ceil(rows / ranks) each, the last ones fewer or none."""
    each = -(-param.shape[0] // ranks)
    return max(0, min(each, param.shape[0] - rank * each))
