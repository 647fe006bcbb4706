"""The same losses whatever the strategy and the world size."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.strategies import cases

Curves = dict[str, cases.Curve]


@pytest.fixture(scope="module")
def single() -> Curves:
    return {
        name: run_ranks(1, "tests.strategies.cases:curves", names=["single"], optimizer=name)[0]["single"]
        for name in cases.OPTIMIZERS
    }


def test_the_job_itself_is_telling(single: Curves) -> None:
    for curve in single.values():
        assert len(curve) >= 8
        assert curve[0][0] - curve[-1][0] >= 0.3, "the loss must fall, or parity says nothing"
    clipped = [norm > 0.5 for _, norm in single["adamw_clipped"]]
    assert sum(clipped) >= len(clipped) / 2


@pytest.mark.parametrize(
    ("world", "optimizer"),
    [
        pytest.param(world, optimizer, marks=() if world != 3 and optimizer == "adamw_clipped" else pytest.mark.slow)
        for world in (2, 3, 4)
        for optimizer in cases.OPTIMIZERS
    ],
)
def test_every_strategy_gives_the_losses_of_one_process(world: int, optimizer: str, single: Curves) -> None:
    names = ["ddp", "fsdp", "zero1", "zero2", "zero3"] if world < 4 else ["hsdp"]
    compare(world, names, optimizer, single)


OFFLOAD = {
    1: ["ddp", "fsdp", "zero2+optimizer", "zero3+optimizer+param"],
    2: ["zero1+optimizer", "zero2+optimizer", "zero3+optimizer", "zero3+optimizer+param", "fsdp+optimizer+param"],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", OFFLOAD)
def test_offload_gives_the_losses_of_one_process(world: int, single: Curves) -> None:
    compare(world, OFFLOAD[world], "adamw_clipped", single)


def compare(world: int, names: list[str], optimizer: str, single: Curves) -> None:
    for rank_result in run_ranks(world, "tests.strategies.cases:curves", names=names, optimizer=optimizer):
        for name, curve in rank_result.items():
            cases.assert_curve(curve, single[optimizer], name)
