"""Initial weights: a rank draws a part of a large parameter, and gets the values that any other engine would get."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkit.errors import ConfigError
from shardkit.parallel.draws import CHUNK, Uncut, record
from shardkit.parallel.weights import Weights
from tests.parallel.drawing import Layers
from tests.ranks import run_ranks

SHAPE = torch.Size((701, 1009))  # 2.7 chunks
MIB_BESIDE = 64


def padded(full: torch.Tensor) -> None:
    nn.init.normal_(nn.Parameter(full), 0.0, 0.02)
    nn.init.zeros_(full[400])


RULES: dict[str, tuple[Callable[[torch.Tensor], object], float]] = {
    "normal": (lambda full: full.normal_(1.0, 0.5), 0.5),
    "uniform": (lambda full: nn.init.uniform_(full, -1.0, 1.0), 3**-0.5),
    "xavier": (lambda full: nn.init.xavier_normal_(full), (2 / 1710) ** 0.5),
    "kaiming": (lambda full: nn.init.kaiming_uniform_(full, a=5**0.5), (3 * 1009) ** -0.5),
    "truncated": (lambda full: nn.init.trunc_normal_(full, std=0.02), 0.02),
    "cut off": (lambda full: nn.init.trunc_normal_(full, std=1.0, a=-1.0, b=1.0), 0.5396),
    "scaled": (lambda full: full.data.normal_().mul_(0.1).clamp_(-5, 5).add_(2.0), 0.1),
    "written twice": (lambda full: (nn.init.xavier_uniform_(full), nn.init.normal_(full.data, std=0.3)), 0.3),
    "a row of zeros": (padded, 0.02),
    "ones": (lambda full: nn.init.ones_(full), 0.0),
}
"""Name → (a way to initialise a tensor, the standard deviation of its values)."""


@pytest.mark.parametrize("rule", RULES)
def test_a_part_has_the_values_of_the_whole(rule: str) -> None:
    init, std = RULES[rule]
    weights = Weights(3, lambda fqn, full, generator: init(full))
    full = torch.empty(SHAPE.numel())
    weights.fill("w", SHAPE, full)
    drawn = weights.values_drawn
    assert drawn in (SHAPE.numel(), 0), "a rule that is overwritten draws nothing"
    assert full.std().item() == pytest.approx(std, rel=0.02)
    for ranks in (2, 3, 4):
        rows = -(-SHAPE[0] // ranks)
        for rank in range(ranks):
            part = full.view(SHAPE)[rank * rows : (rank + 1) * rows].flatten()
            weights.values_drawn = 0
            own_part = torch.empty_like(part)
            weights.fill("w", SHAPE, own_part, rank * rows * SHAPE[1])
            assert torch.equal(own_part, part)
            assert weights.values_drawn <= (part.numel() + 2 * CHUNK if drawn else 0)
    if rule == "a row of zeros":
        assert not full.view(SHAPE)[400].any()
        assert full.view(SHAPE)[399].all()


def test_chunks_names_and_seeds_are_independent() -> None:
    drawn = {}
    for seed, name in ((1, "a"), (1, "b"), (2, "a")):
        out = torch.empty(4 * CHUNK)
        Weights(seed, lambda fqn, full, generator: full.normal_()).fill(name, out.shape, out)
        drawn |= {(seed, name, i): chunk for i, chunk in enumerate(out.view(4, CHUNK))}
    together = torch.stack(list(drawn.values()))
    assert (torch.corrcoef(together) - torch.eye(12)).abs().max() < 6 / CHUNK**0.5


@pytest.mark.parametrize(
    ("init", "reason"),
    [
        (lambda full: nn.init.orthogonal_(full), "aten.normal_ for another tensor"),
        (lambda full: full.copy_(torch.linspace(0, 1, full.numel()).view_as(full)), "aten.copy_"),
        (lambda full: (full.normal_(), full[:, 3].zero_()), "aten.zero_"),
        (lambda full: full.numpy(), "numpy"),
        (lambda full: full.normal_() if full.sum() == 0 else None, "aten.sum"),
        (lambda full: full.normal_(generator=torch.Generator()), "draws with a generator of its own"),
        (lambda full: nn.init.trunc_normal_(full, generator=torch.Generator()), "draws with a generator of its own"),
        (lambda full: nn.init.trunc_normal_(full, 0.0, 1.0, -2.0, 2.0, torch.Generator()), "a generator of its own"),
        (lambda full: full[:5].normal_(), "does not write the whole tensor"),
    ],
)
def test_a_call_that_cannot_be_cut_is_named(init: Callable[[torch.Tensor], object], reason: str) -> None:
    with pytest.raises(Uncut, match=reason):
        record(SHAPE, init)


def test_what_cannot_be_cut_is_drawn_whole_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def init(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        nn.init.orthogonal_(full, generator=generator)

    weights, full, part = Weights(0, init), torch.empty(SHAPE.numel()), torch.empty(1000)
    weights.fill("turned", SHAPE, full)
    weights.fill("turned", SHAPE, part, 5000)
    weights.fill("other", SHAPE, part, 5000)
    weights.fill("turned", SHAPE, part, 5000)
    assert torch.equal(part, full[5000:6000])
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "turned, and each parameter like it, is drawn whole on every rank: its initialisation calls aten.normal_ for "
        "another tensor"
    ]


@pytest.mark.parametrize("shape", [(511, 512), (512, 512), SHAPE], ids=["below", "at the limit", "above"])
def test_a_generator_of_a_tasks_own_is_honoured_below_and_above_the_limit(shape: tuple[int, ...]) -> None:
    def init(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
        nn.init.xavier_uniform_(full, generator=torch.Generator().manual_seed(11))

    full, part = torch.empty(math.prod(shape)), torch.empty(1000)
    weights = Weights(0, init)
    weights.fill("w", torch.Size(shape), full)
    weights.fill("w", torch.Size(shape), part, 5000)
    expected = nn.init.xavier_uniform_(torch.empty(shape), generator=torch.Generator().manual_seed(11)).flatten()
    assert torch.equal(full, expected) and torch.equal(part, expected[5000:6000])


@pytest.mark.parametrize("shape", [(3, 4), SHAPE])
def test_a_parameter_that_nothing_fills_is_refused(shape: tuple[int, ...]) -> None:
    weights = Weights(0, lambda fqn, full, generator: full[1:].normal_())
    with pytest.raises(ConfigError, match="nothing initialises w"):
        weights.fill("w", torch.Size(shape), torch.empty(2))


def test_nothing_is_drawn_for_weights_that_are_loaded() -> None:
    weights, out = Weights(0, lambda *_: pytest.fail("drawn"), False), torch.ones(6)
    weights.fill("w", SHAPE, out, 6)
    assert not out.any()


def own() -> nn.Module:
    """Layers of several chunks, a zero row, an LSTM that lists its parameters, and a generator of the model's own."""
    layers = nn.Sequential(nn.Embedding(900, 700, padding_idx=4), nn.LSTM(700, 80), nn.Linear(80, 90), Layers())
    nn.init.orthogonal_(layers[2].weight, generator=torch.Generator().manual_seed(5))
    layers[2].weight.register_hook(lambda grad: grad * 0)
    layers[2].weight.lr_scale = 0.5
    return layers


def test_a_model_without_a_rule_starts_as_without_shardkit() -> None:
    torch.manual_seed(5)
    before, weights = torch.get_rng_state(), Weights(3)
    model = weights.build(own, None)
    assert torch.equal(torch.get_rng_state(), before)
    weights.materialise(model, torch.device("cpu"))
    torch.manual_seed(3)
    for name, value in own().state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert model[2].weight.lr_scale == 0.5 and model[2].weight._backward_hooks
    assert all(a is b for a, b in zip(model[1]._flat_weights, model[1].parameters(), strict=True))


def test_a_module_that_is_built_already_is_left_alone() -> None:
    built = Layers()
    before = {name: value.clone() for name, value in built.state_dict().items()}
    assert Weights(1).build(lambda: built, None) is built
    assert all(torch.equal(value, before[name]) for name, value in built.state_dict().items())


def test_a_parameter_that_a_constructor_leaves_on_meta_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing initialises weight"):
        Weights(0).build(lambda: nn.Linear(3, 3, device="meta"), None)


def gathered(ranks: list[dict[str, Any]], case: str) -> dict[str, np.ndarray]:
    """Each parameter, put together from the parts that ranks hold."""
    out: dict[str, np.ndarray] = {}
    for name in {name for rank in ranks for name in rank[case]["parts"]}:
        parts = [rank[case]["parts"][name] for rank in ranks if name in rank[case]["parts"]]
        out[name] = np.concatenate([values for _, values in sorted({s: v for s, v in parts if len(v)}.items())])
    return out


@pytest.fixture(scope="module")
def single_rank() -> list[dict[str, Any]]:
    return run_ranks(1, "tests.parallel.drawing:held", strategies=["single"])


@pytest.mark.parametrize(
    ("world", "strategies"),
    [
        (2, ["ddp", "fsdp", "zero3"]),
        pytest.param(4, ["fsdp", "hsdp", "zero1", "zero2", "zero3"], marks=pytest.mark.slow),
    ],
)
def test_values_are_those_of_one_process(single_rank: list[dict[str, Any]], world: int, strategies: list[str]) -> None:
    ranks = run_ranks(world, "tests.parallel.drawing:held", strategies=strategies)
    for strategy in strategies:
        for case in ("drawn", "built"):
            drawn, expected = gathered(ranks, f"{strategy} {case}"), gathered(single_rank, f"single {case}")
            assert drawn.keys() == expected.keys()
            for name, values in drawn.items():
                np.testing.assert_array_equal(values, expected[name], err_msg=f"{strategy} {case} {name}")


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("fsdp", 2),
        pytest.param("fsdp", 4, marks=pytest.mark.slow),
        ("zero3", 2),
        pytest.param("zero3", 4, marks=pytest.mark.slow),
        ("ddp", 2),
        pytest.param("ddp", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 4, marks=pytest.mark.slow),
        pytest.param("zero1", 2, marks=pytest.mark.slow),
        pytest.param("zero2", 2, marks=pytest.mark.slow),
    ],
)
def test_a_rank_draws_and_holds_its_share(strategy: str, world: int) -> None:
    shard_values = 80e6 / (world if strategy in ("fsdp", "zero3") else 1)
    for rank in run_ranks(world, "tests.parallel.drawing:wide", strategy=strategy):
        for measured in rank.values():
            assert measured["peak"] < shard_values * 4 / 2**20 + MIB_BESIDE
            assert measured["drawn"] <= 80 / world + 2 * CHUNK / 1e6
