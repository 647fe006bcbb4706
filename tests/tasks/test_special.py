"""Tied and frozen parameters, batch norm, computed buffers and an initialisation of one's own, under every strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardkit.errors import ConfigError
from shardkit.parallel.weights import Weights
from shardkit.run.job import start
from tests.ranks import run_ranks
from tests.tasks import special

STRATEGIES = ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
FROZEN = {f"blocks.{i}.base.{kind}" for i in (0, 1) for kind in ("weight", "bias")}


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run_ranks(1, "tests.tasks.special:outcomes", strategies=["single"])[0]["single"]


@pytest.fixture(scope="module")
def two() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, "tests.tasks.special:outcomes", strategies=STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_one_process_does(strategy: str, one: dict[str, Any], two: list[dict[str, dict[str, Any]]]) -> None:
    assert one["losses"][0] - one["losses"][-1] > 0.1
    moved: dict[str, bool] = {}
    for rank in two:
        found = rank[strategy]
        assert found["losses"] == pytest.approx(one["losses"], abs=1e-5), "initialisation, ties or statistics differ"
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-4)
        assert found["synchronised"] == 2
        for name, changed in found["moved"].items():
            moved[name] = moved.get(name, False) or changed
        assert found["buffers"].keys() == one["buffers"].keys()
        for name, value in found["buffers"].items():
            np.testing.assert_allclose(value, one["buffers"][name], atol=1e-5, err_msg=name)
    assert "head.weight" not in moved, "tied: there is one parameter"
    assert {name for name, changed in moved.items() if not changed} == FROZEN


def test_buffers_are_computed_though_parameters_are_on_meta(one: dict[str, Any]) -> None:
    assert one["buffers"]["frequency"].tolist() == [0.5**i for i in range(special.WIDTH)]
    model = Weights(0, special.init_parameter).build(special.Odd, None)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert model.head.weight is model.embed.weight
    assert not model.blocks[0].base.weight.requires_grad


def test_statistics_are_of_all_ranks(one: dict[str, Any]) -> None:
    # torch's own batch norm on the whole batch, in one process.
    torch.manual_seed(0)
    x = torch.randn(7, 4, 3, requires_grad=True)
    ours, theirs = special.CPUSyncBatchNorm(4), torch.nn.BatchNorm1d(4)
    for norm in (ours, theirs):
        norm(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_batch_norm_warns_once_about_what_it_does_not_see(caplog: pytest.LogCaptureFixture) -> None:
    with start(None, {"parallel.strategy": "single", "run.device": "cpu", "train.grad_accum_steps": 2}) as job:
        job.wrap(special.Odd)
    said = [record.getMessage() for record in caplog.records if "batch norm" in record.getMessage()]
    assert len(said) == 1
    assert "one micro-batch at a time: it does not treat 2 accumulated" in said[0]


def test_sync_batchnorm_without_a_batch_norm_is_refused() -> None:
    settings = {"parallel.strategy": "single", "run.device": "cpu", "model.sync_batchnorm": True}
    with start(None, settings) as job, pytest.raises(ConfigError, match="Linear has no batch norm"):
        job.wrap(torch.nn.Linear(2, 2))
