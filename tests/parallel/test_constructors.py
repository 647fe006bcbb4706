"""Models whose constructors draw their values start with the same bits under every engine; each rank draws a part."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from shardkit.errors import ConfigError
from shardkit.parallel.init_recipe import CHUNK
from shardkit.parallel.weights import BUCKET_BYTES, Weights
from tests.parallel.constructors import MODELS, SEED, digests, large, of_own_generator
from tests.ranks import run_ranks


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "strategies", "models"),
    [
        (2, ["ddp"], ["own"]),
        pytest.param(2, ["ddp", "zero1", "zero2"], list(MODELS), marks=[pytest.mark.slow, pytest.mark.deepspeed]),
        pytest.param(4, ["ddp", "zero2"], ["mixtral", "own"], marks=[pytest.mark.slow, pytest.mark.deepspeed]),
    ],
)
def test_ranks_draw_parts_of_what_one_process_draws(world: int, strategies: list[str], models: list[str]) -> None:
    ranks = run_ranks(world, "tests.parallel.constructors:constructed", strategies=strategies, models=models)
    for name in models:
        expected, drawn, in_parts = large(name)
        assert in_parts > 0
        for strategy in strategies:
            reports = [rank[f"{strategy} {name}"] for rank in ranks]
            for report in reports:
                assert report["digests"] == expected, f"{strategy} {name}"
            together = sum(report["drawn"] for report in reports)
            assert together >= in_parts + world * (drawn - in_parts)
            assert max(report["drawn"] for report in reports) < drawn - in_parts + in_parts / world + 2 * CHUNK * len(
                expected
            )


@pytest.mark.parametrize("name", list(MODELS))
def test_what_waits_for_its_values_gets_those_of_a_plain_start(name: str) -> None:
    expected, _, in_parts = large(name)
    weights = Weights(SEED)
    model = weights.build(MODELS[name], None, later="unwritten")
    parameters = list(model.parameters())
    weights.materialise(model, torch.device("cpu"))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert digests(model) == expected
    assert in_parts > 0


@pytest.mark.parametrize("later", [None, "unwritten", "on meta"])
def test_a_generator_of_the_models_own_is_honoured(later: Literal["unwritten", "on meta"] | None) -> None:
    """Whatever the size, as it is without shardkit: the draws before and after it come from that generator too."""
    weights = Weights(SEED)
    model = weights.build(MODELS["own"], None, later=later)
    weights.materialise(model, torch.device("cpu"))
    for name, expected in of_own_generator().items():
        assert torch.equal(model.get_parameter(f"seeded.{name}"), expected), name


def test_small_models_start_as_without_shardkit() -> None:
    def small() -> nn.Module:
        layers = nn.Sequential(nn.Embedding(90, 70, padding_idx=4), nn.LSTM(70, 80), nn.Linear(80, 90))
        nn.init.orthogonal_(layers[2].weight)
        return layers

    weights = Weights(3)
    model = weights.build(small, None, later="unwritten")
    weights.materialise(model, torch.device("cpu"))
    torch.manual_seed(3)
    assert digests(model) == digests(small())
    assert weights.values_drawn == 0


def test_a_head_that_is_tied_is_not_drawn_beside_the_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(600, 700), nn.Linear(700, 600, bias=False)
            self.head.weight = self.embed.weight

    weights = Weights(0)
    model = weights.build(Tied, None, later="unwritten")
    assert weights.values_drawn == 0
    weights.materialise(model, torch.device("cpu"))
    assert weights.values_drawn == 600 * 700
    assert model.head.weight is model.embed.weight


def test_hooks_and_marks_on_parameters_stay() -> None:
    def frozen_row() -> nn.Module:
        layer = nn.Linear(600, 600)
        layer.weight.register_hook(lambda grad: grad * 0)
        layer.weight.lr_scale = 0.5
        return layer

    weights = Weights(0)
    model = weights.build(frozen_row, None, later="unwritten")
    weights.materialise(model, torch.device("cpu"))
    assert model.weight.lr_scale == 0.5
    model(torch.ones(600)).sum().backward()
    assert not model.weight.grad.any()


@pytest.mark.dist
def test_what_ranks_draw_whole_is_said_once() -> None:
    ranks = run_ranks(2, "tests.parallel.constructors:said")
    assert ranks == [
        [
            "first.weight, and each parameter like it, is drawn whole on every rank: its initialisation calls "
            "aten.copy_, which needs the whole tensor"
        ],
        [],
    ]


def test_a_parameter_that_a_constructor_leaves_on_meta_is_refused() -> None:
    weights = Weights(0)
    model = weights.build(lambda: nn.Linear(3, 3, device="meta"), None, later="unwritten")
    with pytest.raises(ConfigError, match="nothing initialises weight, which the model's constructor left on the meta"):
        weights.materialise(model, torch.device("cpu"))


@pytest.mark.dist
@pytest.mark.deepspeed
def test_messages_grow_neither_with_ranks_nor_with_parameters() -> None:
    n_bytes = {"tensors": 10_000_000, "ddp": 20 * (261 + 1) * 263 * 4}
    n_bytes |= dict.fromkeys(("zero1", "zero2"), n_bytes["ddp"])
    for world in (2, 3):
        for case, called in run_ranks(world, "tests.parallel.constructors:exchanged")[0].items():
            assert called <= -(-n_bytes[case] // BUCKET_BYTES) + 1, (world, case)
