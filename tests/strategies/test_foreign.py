"""Models that nobody tuned shardkit for: the losses of one process, or a refusal that says what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardkit.parallel.blocks import describe_blocks, find_blocks
from shardkit.parallel.optim import matrices_of_blocks
from tests.ranks import run_ranks
from tests.strategies.foreign import Expert, Experts, TopExperts

SHARED = ["ddp", "fsdp", "zero2", "zero3"]
SHARDED = ["fsdp", "zero2", "zero3"]
TOLERANCE = 2e-6
"""Absolute, on the losses of the first steps, near 4: what another order of additions in fp32 makes of them."""


def both(function: str, strategies: list[str] = SHARED, **kwargs: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process finds, and each of two ranks."""
    target = f"tests.strategies.foreign:{function}"
    one = run_ranks(1, target, strategies=["single"], **{k: f"{v}/1" for k, v in kwargs.items()})[0]
    return one, run_ranks(2, target, strategies=strategies, **{k: f"{v}/2" for k, v in kwargs.items()})


@pytest.mark.dist
@pytest.mark.deepspeed
def test_experts_chosen_by_the_data_train_as_in_one_process_or_are_refused_by_name() -> None:
    one, (first, second) = both("by_expert")
    for case in ("ddp+unused nested", "ddp+unused top", "ddp+unused leaver", "fsdp nested", "fsdp+class top"):
        assert first[case] == pytest.approx(one[f"single {case.split()[1]}"], abs=TOLERANCE), case
    assert first == second, "every rank ends with the same words"
    refused = {case: words for case, words in first.items() if isinstance(words, str)}
    assert set(refused) == {*(f"{s} {c}" for s in ("ddp", "zero2", "zero3") for c in ("nested", "top", "leaver")),
                            "fsdp top", "fsdp leaver", "fsdp late"}  # fmt: skip
    assert "calls mixture.experts.0 where rank 1 calls mixture.experts.2 (step 1)" in refused["fsdp top"]
    assert "block_classes that every rank calls (ExpertLayer)" in refused["fsdp top"]
    assert "calls the end of forward where rank 1 calls blocks.2 (step 1)" in refused["fsdp leaver"]
    assert "calls the end of forward where rank 1 calls blocks.3 (step 4)" in refused["fsdp late"], refused
    assert "rank 0 calls layers.0.experts.0 where rank 1 calls layers.0.experts.2" in refused["zero3 nested"]
    for case in ("zero2 nested", "zero3 nested"):
        assert (
            "parallel.find_unused=true, or fsdp with block_classes that every rank calls (ExpertLayer)" in refused[case]
        )
    assert "depends on 16 parameters that rank 1's does not depend on" in refused["ddp nested"]
    assert all(refused[f"ddp {case}"].endswith("fix: set parallel.find_unused=true") for case in ("nested", "top"))


@pytest.mark.dist
@pytest.mark.deepspeed
def test_parameters_that_are_one_number_train_everywhere_and_checkpoints_with_them_travel(tmp_path: Path) -> None:
    one, (found, _) = both("scalars", root=str(tmp_path))
    for name in SHARED:
        assert found[f"{name} built"] == pytest.approx(one["single built"], abs=TOLERANCE), name
        assert found[f"{name} drawn"] == pytest.approx(one["single drawn"], abs=TOLERANCE), name
        for saver in SHARED:
            assert found[f"{saver} to {name}"] == pytest.approx(one["single to single"], abs=TOLERANCE), (saver, name)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_model_that_mixes_types_trains_under_autocast_or_is_refused_with_it_as_the_advice() -> None:
    one, (found, _) = both("mixed")
    for name in SHARDED:
        assert "precision.autocast=true" in found[name].splitlines()[1], found[name]
        assert found[f"{name}+autocast"] == pytest.approx(one["single"], abs=0.02), "two runs in bf16"
    assert found["ddp"] == pytest.approx(one["single"], abs=0.02)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_loss_finds_the_attributes_of_its_model_but_may_not_go_round_its_call() -> None:
    one, (found, _) = both("attributes")
    for name in SHARED:
        assert found[name] == pytest.approx(one["single"], abs=TOLERANCE), name
        assert "call model(...) in the loss" in found[f"{name} round"], name


@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_model_may_import_what_it_needs_when_it_is_built_under_zero3() -> None:
    (losses,) = run_ranks(1, "tests.strategies.foreign:lazy", env={"SHARDKIT_FRESH": "1"})
    assert isinstance(losses, list), losses


class Towers(nn.Module):
    """An encoder and a decoder of their own classes, experts in each decoder layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Expert() for _ in range(3)])
        self.decoder = Experts(layers=2)
        self.head = nn.Linear(16, 16)


def test_every_list_of_equal_blocks_counts_and_none_inside_another() -> None:
    model = Towers()
    blocks = find_blocks(model)
    assert blocks == [*model.encoder, *model.decoder.layers]
    words = describe_blocks(model, blocks)
    assert words.startswith("3 Expert in encoder, 2 ExpertLayer in decoder.layers; 12% of the parameters are in none: ")
    assert words.endswith(": decoder.head, decoder.embed, head"), words
    matrices = matrices_of_blocks(model)
    assert id(model.encoder[0][0].weight) in matrices and id(model.decoder.layers[1].experts[0][0].weight) in matrices
    assert id(model.head.weight) not in matrices


def test_blocks_in_lists_of_several_kinds() -> None:
    mixed = nn.Sequential(nn.Embedding(4, 16), Expert(), Experts(), Expert(), nn.Linear(16, 4))
    assert find_blocks(mixed) == [mixed[1], *mixed[2].layers, mixed[3]]
    one_layer = Experts(layers=1)
    assert find_blocks(one_layer) == [], "the experts of a single layer are no blocks either"
    assert find_blocks(nn.ModuleList([*Experts().layers, Towers()]))[0].__class__.__name__ == "ExpertLayer"
    linears = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert find_blocks(linears) == list(linears)
    shared = Expert()
    assert find_blocks(nn.ModuleList([shared, shared, shared])) == [shared]
    assert find_blocks(TopExperts())[0].__class__ is Expert, "nothing tells that these are chosen by the data"
