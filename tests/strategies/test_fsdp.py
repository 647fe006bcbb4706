"""FSDP2 on its own: how far ahead blocks are gathered, experts that an older torch cannot train, and models whose
blocks share parts or are reached into."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit.errors import ConfigError
from shardkit.parallel.blocks import chosen_by_data, describe_blocks, find_blocks, find_units
from shardkit.run.job import start
from shardkit.strategies import fsdp
from shardkit.strategies.reach import UnusedParameters
from tests.ranks import run_ranks
from tests.strategies import cases, reaching


def prefetched(ahead: int) -> dict[str, dict[int, list[int]]]:
    """Direction → block → the blocks that are gathered ahead of it; for `run_ranks`."""
    told: dict[str, list[tuple[Any, list[Any]]]] = {"forward": [], "backward": []}
    for direction, calls in told.items():
        note = lambda block, others, calls=calls: calls.append((block, others))  # noqa: E731
        setattr(FSDPModule, f"set_modules_to_{direction}_prefetch", note)
    with start(None, cases.overrides("fsdp", 1, "adamw_clipped", **{"parallel.prefetch": ahead})) as job:
        cases.wrap(job, cases.MODEL.model_copy(update={"n_layers": 4}))
        model = job.strategy.model
        number = {id(block): index for index, block in enumerate(model.blocks)}
        return {
            direction: {number[id(block)]: [number[id(other)] for other in others] for block, others in calls}
            for direction, calls in told.items()
        }


def test_so_many_blocks_are_gathered_ahead_as_is_asked_for() -> None:
    (found,) = run_ranks(1, "tests.strategies.test_fsdp:prefetched", ahead=2)
    assert found == {
        "forward": {0: [1, 2], 1: [2, 3], 2: [3], 3: []},
        "backward": {3: [2, 1], 2: [1, 0], 1: [0], 0: []},
    }


def gathered_bytes(settings: dict[str, Any]) -> tuple[cases.Curve, int]:
    """(each step's loss and norm, the most bytes of gathered parameters after a forward); for `run_ranks`."""
    most, rank, world = 0, dist.get_rank(), dist.get_world_size()
    with start(None, settings) as job:
        cases.wrap(job)

        def loss_fn(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            nonlocal most
            loss = cases.loss_fn(model, batch)
            most = max(most, sum(t.untyped_storage().nbytes() for t in job.strategy.communication_tensors()))
            return loss

        steps = [job.step(cases.micro_batches(i, rank, world), loss_fn, cases.n_targets) for i in range(cases.STEPS)]
        return [(step.loss, step.grad_norm) for step in steps], most


WITHOUT_SHARDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "one rank, without reductions": (1, {"parallel.no_sync": True}),
    "one rank that keeps blocks": (1, {"parallel.reshard_after_forward": False}),
    "replicas": (2, {"parallel.strategy": "hsdp", "parallel.dp_replicate": 2, "parallel.dp_shard": 1}),
}


@pytest.mark.parametrize("case", WITHOUT_SHARDS)
def test_a_rank_that_has_all_parameters_computes_with_them_where_they_lie(case: str) -> None:
    world, keys = WITHOUT_SHARDS[case]
    (one,) = run_ranks(1, "tests.strategies.cases:curves", names=["single"])
    settings = cases.overrides("fsdp", world) | keys
    for curve, gathered in run_ranks(world, "tests.strategies.test_fsdp:gathered_bytes", settings=settings):
        cases.assert_curve(curve, one["single"], case)
        assert gathered == 0


def test_a_rank_that_has_all_parameters_gathers_what_it_computes_with_in_another_type() -> None:
    settings = cases.overrides("fsdp", 1, **{"precision.mode": "bf16"})
    ((_, gathered),) = run_ranks(1, "tests.strategies.test_fsdp:gathered_bytes", settings=settings)
    assert gathered > 0


class Two:
    """A world of two ranks, of which so many used each parameter."""

    size = 2

    def __init__(self, used: list[float]) -> None:
        self.used = used

    def sum(self, mine: list[float]) -> list[float]:
        assert len(mine) == len(self.used)
        return self.used


@pytest.mark.parametrize("adds_unused", [True, False])
def test_a_parameter_that_some_ranks_used_needs_a_torch_that_adds_zeros_for_the_others(
    adds_unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "REDUCES_UNUSED", adds_unused)
    engine = object.__new__(fsdp.FSDP)
    engine.name, engine.model = "fsdp", nn.Linear(2, 1)

    def after(used: list[float]) -> list[bool]:
        """Whether weight and bias are updated."""
        engine._may_differ = ["weight", "bias"]
        engine._world = Two(used)
        skipped = engine.skipped(UnusedParameters(engine.model))
        return [all(param is not other for other in skipped) for param in engine.model.parameters()]

    assert after([2.0, 0.0]) == [True, False]
    if adds_unused:
        assert after([1.0, 0.0]) == [True, False]
        return
    with pytest.raises(ConfigError, match="1 of 2 ranks used weight in this step") as error:
        after([1.0, 0.0])
    assert "torch 2.13" in error.value.fix


REACHING = "tests.strategies.reaching:"


def test_shared_and_tied_parts_of_blocks_train_as_in_one_process() -> None:
    (one,) = run_ranks(1, REACHING + "curves", strategy="single", policies=["none"])
    first, second = run_ranks(2, REACHING + "curves", strategy="fsdp", policies=["none", "full"], timeout=400)
    assert first == second
    for (model, policy), curve in first.items():
        assert not isinstance(curve, str), f"{model} {policy}: {curve}"
        assert torch.allclose(torch.tensor(curve), torch.tensor(one[model, "none"]), rtol=2e-5), (model, policy)


def test_what_fsdp_cannot_gather_is_refused_by_name() -> None:
    refused, _ = run_ranks(2, REACHING + "refusals", timeout=300)
    assert "is used where it is not gathered" in refused["Leftover"], refused
    assert "a parameter of SideLoss is used where it is not gathered" in refused["SideLoss"], refused
    assert re.search(r"blocks\.\d\.norm in the block blocks\.\d \(.*reaching.py:\d+\) is used", refused["Late"])
    assert "changes its input in place" in refused["InPlace"] and "blocks.0" in refused["InPlace"]
    assert "blocks.0.norm " in refused["PartCalled"] and "is used where it is not gathered" in refused["PartCalled"]
    assert "blocks.0.norm in the block blocks.0" in refused["ByRank"], "every rank says so"


def test_a_parameter_that_no_unit_owns_is_refused_at_wrap() -> None:
    (refused,) = run_ranks(1, REACHING + "unsharded")
    assert "parallel.strategy=fsdp does not shard head.weight" in refused


def test_units_own_each_parameter_once_and_innermost_come_first() -> None:
    model = reaching.SharedInShared()
    units = find_units(model, find_blocks(model))
    names = {name: unit.kind for unit in units for name in unit.names}
    assert sorted(name for unit in units for name in unit.names) == sorted(name for name, _ in model.named_parameters())
    assert [unit.kind for unit in units if unit.kind != "block"] == ["shared", "shared", "shared", "rest"]
    assert {names[f"blocks.0.{name}.weight"] for name in ("mix.norm", "mix.mix", "norm")} == {"shared"}
    order = [unit.modules for unit in units]
    assert order.index((model.norm,)) < order.index((model.blocks[0].mix,)) < order.index((model.blocks[0],))
    words = describe_blocks(model, find_blocks(model))
    assert "shared" not in words, "no engine has sharded it"
    tied = reaching.Tied()
    (group,) = [unit for unit in find_units(tied, find_blocks(tied)) if unit.kind == "tied"]
    assert set(group.modules) == {tied.last, tied.blocks[0].mix, tied.blocks[2].mix}
    model.blocks[0].weight = model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match=r"one is inside another \(blocks\.0, the model\)"):
        find_units(model, find_blocks(model))


def test_an_activation_or_a_list_that_blocks_share_is_no_unit_but_its_members_are() -> None:
    model = reaching.Model()
    activation, experts = nn.GELU(), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for block in model.blocks:
        block.activation, block.experts = activation, experts
    shared = {unit.modules for unit in find_units(model, find_blocks(model)) if unit.kind == "shared"}
    assert shared == {(experts[0],), (experts[1],)}
    assert {name.partition(".experts.")[0] for name in chosen_by_data(model, list(model.blocks))} == {"blocks.0"}
