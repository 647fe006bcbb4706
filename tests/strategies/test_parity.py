"""Every engine computes each gradient and weight of one process in plain torch, in ragged and accumulated batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.strategies.cases import OPTIMIZERS, Ragged
from tests.strategies.graphs.campaign import Campaign

TWO_RANKS = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
OFFLOADED = ["fsdp+offload", "zero1+offload", "zero2+offload", "zero3+offload"]
FEATURES = ["tied", "frozen"]
SETTINGS: list[dict[str, Any]] = [
    {"precision.mode": "bf16"},
    *({"activation.policy": policy} for policy in ("full", "selective", "selective_op")),
    {"activation.policy": "every_k", "activation.every_k": 2},
    {"train.grad_accum_steps": 1},
    {"train.grad_accum_steps": 3, "precision.mode": "bf16", "activation.policy": "full"},
]

pytestmark = pytest.mark.timeout(600)


def with_settings(extra: dict[str, Any]) -> Ragged:
    return Ragged(extra=tuple(extra.items()))


def assert_equal(cases: Sequence[Ragged], engines: Sequence[str], world: int = 2) -> None:
    campaign = Campaign(limit_s=120, world=world)
    campaign.run(cases, engines)
    assert len(campaign.verdicts) == len(cases) * len(engines)
    wrong = [verdict.line for verdict in campaign.verdicts if verdict.outcome != "equal"]
    assert not wrong, "\n".join(wrong)


@dataclass(frozen=True)
class Nudged(Ragged):
    """Its ranks have another gradient of one number, too small for the loss and the norm to show."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        first = next(iter(model.parameters())).flatten()[0]
        return super().loss(model, batch) + 1e-3 * first * torch.distributed.is_initialized()


def test_another_gradient_of_one_number_is_wrong() -> None:
    campaign = Campaign(limit_s=120)
    campaign.run([Nudged()], ["ddp"])
    (verdict,) = campaign.verdicts
    assert verdict.outcome == "wrong" and "step 1: 1 of 29 gradients differ" in verdict.words, verdict.line


def test_every_engine_and_feature() -> None:
    assert_equal([Ragged(), *(Ragged(feature=name) for name in FEATURES), with_settings(SETTINGS[0])], TWO_RANKS)


@pytest.mark.slow
def test_every_engine_with_each_setting() -> None:
    assert_equal([*map(with_settings, SETTINGS[1:]), Ragged("sgd_unclipped")], TWO_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "engines"), [(3, TWO_RANKS), (4, ["hsdp"])])
def test_three_ranks_and_replicas_of_shards(world: int, engines: list[str]) -> None:
    features = [Ragged(feature=name) for name in FEATURES]
    assert_equal([*map(Ragged, OPTIMIZERS), *features, *map(with_settings, SETTINGS)], engines, world)


@pytest.mark.slow
def test_offloaded_engines() -> None:
    assert_equal([Ragged()], OFFLOADED)


@pytest.mark.slow
def test_one_rank() -> None:
    assert_equal([Ragged()], ["ddp", "fsdp", "zero2+offload", "zero3+offload"], world=1)
