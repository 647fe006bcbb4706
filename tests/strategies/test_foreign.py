"""Models that nobody tuned shardkit for: the losses of one process, or a refusal that says what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.parallel.blocks import describe_blocks, find_blocks, n_values
from shardkit.parallel.optim import matrices_of_blocks
from tests.ranks import run_ranks
from tests.strategies.foreign import (
    MODELS,
    Complex,
    Expert,
    Experts,
    NamedExperts,
    TopExperts,
    Transposed,
    idle,
    tokens,
)  # fmt: skip

ENGINES = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
SHARED = ["ddp", "fsdp", "zero2", "zero3"]
SHARDED = ["fsdp", "zero2", "zero3"]
FOREIGN_TOLERANCE = 5e-6
TOLERANCE = 2e-6
"""Absolute, on the losses of the first steps, near 4: what another order of additions in fp32 makes of them."""


FOREIGN = "tests.strategies.foreign:"


def both(function: str, **kwargs: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process finds, and each of two ranks."""
    (one,) = run_ranks(1, FOREIGN + function, strategies=["single"], **kwargs)
    return one, run_ranks(2, FOREIGN + function, strategies=SHARED, **kwargs)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
def test_experts_chosen_by_the_data_train_as_in_one_process_or_are_refused_by_name() -> None:
    cases = ["nested", "top", "named", "leaver", "together"]
    (one,) = run_ranks(1, FOREIGN + "by_expert", strategies=["single"], cases=cases)
    first, second = run_ranks(2, FOREIGN + "by_expert", strategies=["ddp", "fsdp", "zero2"], cases=cases)
    assert first == second, "every rank ends with the same words"
    for case in ("ddp top", "ddp named True"):
        assert first.pop(case) == pytest.approx(one[f"single {case.split()[1]}"], abs=TOLERANCE), case
    for name in ("ddp", "fsdp", "zero2"):
        assert first.pop(f"{name} nested") == pytest.approx(one["single nested"], abs=TOLERANCE), name
        assert first.pop(f"{name} named") == pytest.approx(one["single named"], abs=TOLERANCE), name
        assert first.pop(f"{name}+class top") == pytest.approx(one["single top"], abs=TOLERANCE), name
    for name in ("ddp", "fsdp"):
        assert first.pop(f"{name} together") == pytest.approx(one["single together"], abs=TOLERANCE), name
    assert "no gradient in this step" in first.pop("zero2 together")
    assert isinstance(first.pop("ddp leaver"), list), "trains; one process would leave at another depth"
    assert all(isinstance(words, str) for words in first.values()), first
    assert "calls mixture.parts.0 where rank 1 calls mixture.parts.2 (step 1)" in first["fsdp top"]
    assert "block_classes that every rank calls (ExpertLayer)" in first["fsdp top"]
    assert "block_classes that every rank calls (ExpertLayer)" in first["zero2 top"]
    assert "is at the end of forward where rank 1 calls blocks.2 (step 1)" in first["fsdp leaver"]
    assert "rank 0 calls blocks.3 where rank 1 calls blocks.2 (step 4)" in first["fsdp late"], "found by the step's end"
    assert "depends on 8 parameters that rank 1's does not depend on" in first["ddp top False"]
    assert first["ddp top False"].endswith("fix: remove parallel.find_unused")


OFFLOADED = [f"zero{stage}{offload}" for stage in (1, 2, 3) for offload in ("", " offload")]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("function", "strategies"),
    [
        pytest.param("by_branch", ENGINES, id="a part that one rank needs"),
        pytest.param("early_block", ["ddp", "fsdp", *OFFLOADED], id="a block that last micro-batches leave out"),
        pytest.param("idle_experts", ["ddp", "zero1", "zero2", "zero3"], id="an expert that no rank uses"),
    ],
)
def test_what_is_left_out_at_times_trains_as_in_one_process(function: str, strategies: list[str]) -> None:
    """By AdamW with weight decay: the losses and the last norm."""
    (one,) = run_ranks(1, FOREIGN + function, strategies=["single"])
    first, second = run_ranks(2, FOREIGN + function, strategies=strategies, timeout=200)
    assert first == second
    for case, found in first.items():
        want = one.get(" ".join(["single", *case.split()[1:]]), one["single"])
        if case.startswith("zero") and case.endswith("idle"):
            assert "12 of 29 parameters got no gradient in this step on any rank (blocks.0.branch.0.weight, …)" in found
        else:
            assert found == pytest.approx(want, abs=TOLERANCE), case


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("build", "batches", "steps", "savers", "others"),
    [
        (Experts, idle, 4, ENGINES, ENGINES),
        (Transposed, tokens, 3, SHARED, ["ddp", "zero1", "zero3"]),
        (Complex, tokens, 3, ["ddp"], ["ddp"]),
    ],
    ids=["experts that were never used", "not contiguous", "complex"],
)
def test_checkpoints_of_uncommon_weights_travel(
    build: Any, batches: Any, steps: int, savers: list[str], others: list[str], tmp_path: Path
) -> None:
    given = {"build": build, "batches": batches, "steps": steps}
    single: Any = {"savers": ["single"], "others": ["single"], "root": str(tmp_path / "one")}
    (alone,) = run_ranks(1, FOREIGN + "travelled", **given, **single)
    two: Any = {"savers": savers, "others": others, "root": str(tmp_path / "two")}
    travelled, _ = run_ranks(2, FOREIGN + "travelled", **given, **two, timeout=300)
    for case, losses in travelled.items():
        assert losses == pytest.approx(alone["single to single"], abs=TOLERANCE), case


@pytest.mark.dist
@pytest.mark.deepspeed
def test_zero3_refuses_blocks_that_some_ranks_skip_before_it_gathers_them() -> None:
    first, second = run_ranks(2, FOREIGN + "by_expert", strategies=["zero3"], cases=["leaver"], timeout=120)
    assert first == second
    assert "rank 1 calls blocks.2" in first["zero3 leaver"], first


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
def test_unusual_parameters_and_calls_train_as_in_one_process_or_are_refused_when_the_model_is_wrapped() -> None:
    trained, refused = ["transposed", "hooked", "recursive"], ["sparse", "bag", "lazy", "expanded", "complex"]
    (one,) = run_ranks(1, FOREIGN + "unusual", strategies=["single"], cases=trained + refused)
    first, second = run_ranks(2, FOREIGN + "unusual", strategies=SHARED, cases=trained + refused, timeout=120)
    assert first == second
    causes = {
        "sparse": "embed.weight is an Embedding with sparse=True",
        "bag": "bag.weight is an EmbeddingBag with sparse=True",
        "lazy": "weight of LazyLinear has no size", "expanded": "head.bias is expanded",
        "complex": "cannot shard complex parameters",
    }  # fmt: skip
    for key, found in (one | first).items():
        name, case, *_ = key.split()
        if case in trained or (case == "complex" and name in ("single", "ddp")):
            assert found == pytest.approx(one[key.replace(name, "single", 1)], abs=TOLERANCE), key
        else:
            assert isinstance(found, str) and causes[case] in found, (key, found)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
def test_parameters_that_are_one_number_train_everywhere_and_checkpoints_with_them_travel(tmp_path: Path) -> None:
    (one,) = run_ranks(1, FOREIGN + "scalars", strategies=["single"], root=str(tmp_path / "one"))
    found, _ = run_ranks(2, FOREIGN + "scalars", strategies=SHARED, root=str(tmp_path / "two"))
    for name in SHARED:
        assert found[f"{name} built"] == pytest.approx(one["single built"], abs=TOLERANCE), name
        assert found[f"{name} drawn"] == pytest.approx(one["single drawn"], abs=TOLERANCE), name
        for saver in SHARED:
            assert found[f"{saver} to {name}"] == pytest.approx(one["single to single"], abs=TOLERANCE), (saver, name)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_model_may_import_what_it_needs_when_it_is_built_under_zero3() -> None:
    (losses,) = run_ranks(1, FOREIGN + "lazy", env={"SHARDKIT_FRESH": "1"})
    assert isinstance(losses, list), losses


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    return run_ranks(1, FOREIGN + "foreign", models=[*MODELS], strategies=["single"], timeout=600)[0]


@pytest.mark.release
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("model", [*MODELS])
def test_a_foreign_model_has_the_losses_of_one_process_or_is_refused(model: str, one_process: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    first, second = run_ranks(2, FOREIGN + "foreign", models=[model], strategies=SHARED, timeout=400)
    want = one_process[model]["single"]
    assert isinstance(want, list) and want[-1] != want[0], want
    for name in SHARED:
        assert first[model][name] == pytest.approx(want, rel=FOREIGN_TOLERANCE, abs=FOREIGN_TOLERANCE), name
    assert first == second


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
def test_mixtures_of_experts_of_transformers_have_the_losses_of_one_process() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    models = ["mixtral", "qwen2_moe"]
    (one,) = run_ranks(1, FOREIGN + "foreign", models=models, strategies=["single"])
    found, _ = run_ranks(2, FOREIGN + "foreign", models=models, strategies=SHARED)
    for model in models:
        for name in SHARED:
            assert found[model][name] == pytest.approx(one[model]["single"], abs=FOREIGN_TOLERANCE), (model, name)


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
    assert words.startswith(
        "3 Expert in encoder, 2 ExpertLayer in decoder.layers; 12% of the parameters belong to no block: "
    )
    assert words.endswith(": decoder.head, decoder.embed, head"), words
    matrices = matrices_of_blocks(model)
    assert id(model.encoder[0][0].weight) in matrices and id(model.decoder.layers[1].experts[0][0].weight) in matrices
    assert id(model.head.weight) not in matrices


def test_bytes_of_a_models_own_count_once_and_those_of_a_layer_in_4_bits_twice() -> None:
    table = nn.Parameter(torch.zeros(6, dtype=torch.uint8), requires_grad=False)
    assert n_values("blocks.0.table", table) == 6
    assert n_values("blocks.0.packed", table) == 12
    assert n_values("blocks.0.absmax", table) == 0


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
    assert find_blocks(NamedExperts()) == [], "the name of the list does"


@pytest.mark.slow
@pytest.mark.dist
def test_ddp_finds_what_a_rank_did_not_use_beside_a_reentrant_checkpoint() -> None:
    first, second = run_ranks(2, FOREIGN + "reentrant")
    assert first == second and len(first) == 6 and min(first) > 0
