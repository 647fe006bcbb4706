"""Strategy × 16 bits × activation checkpointing × accumulation: the losses of the plain fp32 single run."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks

MATRIX = "tests.strategies.precision_cases:matrix"
POLICIES = ["none", "full", "every_k", "selective", "selective_op"]
NAMES = {1: ["single"], 2: ["ddp", "fsdp", "zero1", "zero2", "zero3"], 4: ["hsdp"]}

Curves = dict[tuple[str, str, str, int], list[float]]


def matrix(world: int, modes: list[str], policies: list[str]) -> Curves:
    return run_ranks(world, MATRIX, timeout=500, names=NAMES[world], modes=modes, policies=policies)[0]


def worst(curve: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(curve, other, strict=True))


@pytest.fixture(scope="module")
def single() -> Curves:
    return matrix(1, ["fp32", "bf16", "pure_bf16"], POLICIES)


def agree(found: Curves, single: Curves) -> None:
    want = single["single", "fp32", "none", 2]
    # What bf16 is worth in this job: how far single runs that round elsewhere lie from fp32.
    bf16 = 2 * max(worst(curve, want) for (_, mode, _, _), curve in single.items() if mode != "fp32")
    assert bf16 < 0.05
    for key, curve in found.items():
        limit = 1e-5 if key[1] == "fp32" else bf16
        assert worst(curve, want) <= limit, f"{key}: {curve} instead of {want}"
        assert key[1] == "fp32" or curve != want, f"{key} did not compute in bf16"


@pytest.mark.slow
def test_one_process(single: Curves) -> None:
    assert len(single) == 3 * len(POLICIES) * 2
    agree(single, single)
    for (name, mode, policy, accum), curve in single.items():  # recomputing changes nothing, to the bit
        assert curve == single[name, mode, "none", accum], (mode, policy, accum)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4])
def test_every_strategy(world: int, single: Curves) -> None:
    agree(matrix(world, ["bf16", "pure_bf16"], POLICIES), single)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16"])
def test_on_a_gpu(mode: str, single: Curves) -> None:
    found: Curves = run_ranks(
        1, MATRIX, timeout=500, names=["single", "fsdp", "zero2", "zero3"], modes=[mode],
        policies=["none", "full", "selective"], device="cuda", init_group=False, gpu=True,
    )[0]  # fmt: skip
    want = single["single", "fp32", "none", 2]
    for key, curve in found.items():
        assert worst(curve, want) <= 0.05, f"{key}: {curve} instead of {want}"
