"""Models that nobody tuned shardkit for: the losses of one process, or a refusal that says what would work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.parallel.blocks import describe_blocks, find_blocks, n_values
from shardkit.parallel.optim import matrices_of_blocks
from tests.ranks import run_ranks
from tests.strategies.foreign import (
    CASES,
    MODELS,
    Complex,
    Expert,
    Experts,
    NamedExperts,
    Scaled,
    TopExperts,
    Transposed,
    draw,
    idle,
    tokens,
)  # fmt: skip

ENGINES = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
SHARED = ["ddp", "fsdp", "zero2", "zero3"]
FOREIGN_TOLERANCE = 5e-6
MIXTURES = ("mixtral", "qwen2_moe")
TOLERANCE = 2e-6
"""Absolute, on the losses of the first steps, near 4: what another order of additions in fp32 makes of them."""


FOREIGN = "tests.strategies.foreign:"


def trained(world: int, todo: list[tuple[str, str]], timeout: float = 180) -> dict[tuple[str, str], Any]:
    """What every rank finds."""
    first, *others = run_ranks(world, FOREIGN + "trained", todo=todo, timeout=timeout)
    assert all(other == first for other in others), "every rank ends with the same words"
    return first


def alone(cases: Iterable[str]) -> dict[str, Any]:
    """What one process finds."""
    return {case: found for (_, case), found in trained(1, [("single", case) for case in cases], 600).items()}


CLASS = "block_classes that every rank calls (ExpertLayer)"
CHOOSING: dict[tuple[str, str], str | None] = {
    **{(name, case): None for name in ("ddp", "fsdp", "zero2") for case in ("nested", "named", "top, by class")},
    ("ddp", "top"): None, ("ddp", "named, looked for"): None, ("ddp", "together"): None, ("fsdp", "together"): None,
    ("zero2", "together"): "no gradient in this step", ("zero2", "top"): CLASS, ("zero2", "leaver"): "",
    ("fsdp", "top"): "calls mixture.parts.0 where rank 1 calls mixture.parts.2 (step 1)",
    ("fsdp", "leaver"): "is at the end of forward where rank 1 calls blocks.2 (step 1)",
    ("fsdp", "late"): "rank 0 calls blocks.3 where rank 1 calls blocks.2 (step 4)",  # found by the step's end
    ("ddp", "top, not looked for"): "depends on 8 parameters that rank 1's does not depend on",
}  # fmt: skip
"""(strategy, case) → the words of the refusal; `None` = it trains."""


@pytest.mark.slow
def test_experts_chosen_by_the_data_train_as_in_one_process_or_are_refused_by_name() -> None:
    one = alone(["nested", "top", "named", "together"])
    found = trained(2, [*CHOOSING, ("ddp", "leaver")])
    assert isinstance(found.pop(("ddp", "leaver")), list), "trains; one process would leave at another depth"
    for (name, case), words in CHOOSING.items():
        if words is None:
            assert found[name, case] == pytest.approx(one[case.partition(",")[0]], abs=TOLERANCE), (name, case)
        else:
            assert isinstance(found[name, case], str) and words in found[name, case], (name, case, found[name, case])
    assert CLASS in found["fsdp", "top"]
    assert found["ddp", "top, not looked for"].endswith("fix: remove parallel.find_unused")


OFFLOADED = ["zero1", "zero1+optimizer", "zero2", "zero2+optimizer", "zero3", "zero3+optimizer+param"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "strategies"),
    [
        pytest.param([case for case in CASES if case.startswith("branch")], ENGINES, id="a part that one rank needs"),
        pytest.param(["early", "early, reentrant"], ["ddp", "fsdp", *OFFLOADED],
                     id="a block that last micro-batches leave out"),
        pytest.param([*(case for case in CASES if case.startswith("idle")), "rare"], ["ddp", "zero1", "zero2", "zero3"],
                     id="an expert that no rank uses"),
    ],
)  # fmt: skip
def test_what_is_left_out_at_times_trains_as_in_one_process(cases: list[str], strategies: list[str]) -> None:
    """By AdamW with weight decay: the losses and the last norm."""
    one = alone(cases)
    todo = [(name, case) for name in strategies for case in cases if (name, case) != ("fsdp", "early, reentrant")]
    for (name, case), found in trained(2, todo, 200).items():
        if name.startswith("zero") and case == "branch, idle":
            assert "12 of 29 parameters got no gradient in this step on any rank (blocks.0.branch.0.weight, …)" in found
        else:
            assert found == pytest.approx(one[case], abs=TOLERANCE), (name, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "batches", "init", "steps", "savers", "others"),
    [
        (Experts, idle, None, 4, ENGINES, ENGINES),
        (Transposed, tokens, None, 3, SHARED, ["ddp", "zero1", "zero3"]),
        (Complex, tokens, None, 3, ["ddp"], ["ddp"]),
        (Scaled, tokens, draw, 3, SHARED, SHARED),
    ],
    ids=["experts that were never used", "not contiguous", "complex", "one number"],
)
def test_checkpoints_of_uncommon_weights_travel(
    build: Any, batches: Any, init: Any, steps: int, savers: list[str], others: list[str], tmp_path: Path
) -> None:
    given = {"build": build, "batches": batches, "init": init, "steps": steps}
    single: Any = {"savers": ["single"], "others": ["single"], "root": str(tmp_path / "one")}
    (alone,) = run_ranks(1, FOREIGN + "travelled", **given, **single)
    two: Any = {"savers": savers, "others": others, "root": str(tmp_path / "two")}
    travelled, _ = run_ranks(2, FOREIGN + "travelled", **given, **two, timeout=300)
    for case, losses in travelled.items():
        assert losses == pytest.approx(alone["single to single"], abs=TOLERANCE), case


def test_zero3_refuses_blocks_that_some_ranks_skip_before_it_gathers_them() -> None:
    assert "rank 1 calls blocks.2" in trained(2, [("zero3", "leaver")], 120)["zero3", "leaver"]


CAUSES = {
    "sparse": "embed.weight is an Embedding with sparse=True", "bag": "bag.weight is an EmbeddingBag with sparse=True",
    "lazy": "weight of LazyLinear has no size", "lazy, drawn": "weight of LazyLinear has no size",
    "expanded": "head.bias is expanded", "complex": "cannot shard complex parameters",
}  # fmt: skip


@pytest.mark.slow
def test_unusual_parameters_train_as_in_one_process_or_are_refused_when_the_model_is_wrapped() -> None:
    trains = ("scaled", "scaled, drawn", "hooked, drawn")
    one = alone([*CAUSES, *trains])
    todo = [(name, case) for name in SHARED for case in (*CAUSES, *trains)]
    todo.remove(("fsdp", "hooked, drawn"))
    found = trained(2, todo) | {("single", case): words for case, words in one.items()}
    for (name, case), result in found.items():
        if case in trains or (case == "complex" and name in ("single", "ddp")):
            assert result == pytest.approx(one[case], abs=TOLERANCE), (name, case)
        else:
            assert isinstance(result, str) and CAUSES[case] in result, (name, case, result)


@pytest.mark.slow
def test_a_model_that_mixes_types_trains_under_autocast_or_is_refused_with_it_as_the_advice() -> None:
    want = alone(["mixed"])["mixed"]
    cases = [(name, case) for name in SHARED[1:] for case in ("mixed", "mixed, autocast")]
    for (name, case), found in trained(2, [("ddp", "mixed"), *cases]).items():
        if name == "ddp" or "autocast" in case:
            assert found == pytest.approx(want, abs=0.02), "two runs in bf16"
        else:
            assert "precision.autocast=true" in found.splitlines()[1], found


def test_a_loss_finds_the_attributes_of_its_model_but_may_not_go_round_its_call() -> None:
    want = alone(["prepared"])["prepared"]
    for (name, case), found in trained(2, [(name, case) for name in SHARED for case in ("prepared", "round")]).items():
        if case == "prepared":
            assert found == pytest.approx(want, abs=TOLERANCE), name
        else:
            assert "call model(...) in the loss" in found, name


@pytest.mark.slow
def test_a_model_may_import_what_it_needs_when_it_is_built_under_zero3() -> None:
    (losses,) = run_ranks(1, FOREIGN + "lazy", env={"SHARDKIT_FRESH": "1"})
    assert isinstance(losses, list), losses


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=pytest.mark.slow if name in MIXTURES else pytest.mark.release) for name in MODELS],
)  # fmt: skip
def test_a_foreign_model_has_the_losses_of_one_process(model: str) -> None:
    want = alone([model])[model]
    assert isinstance(want, list) and want[-1] != want[0], want
    rel = 1e-6 if model in MIXTURES else FOREIGN_TOLERANCE
    for (name, _), found in trained(2, [(name, model) for name in SHARED], 400).items():
        assert found == pytest.approx(want, rel=rel, abs=FOREIGN_TOLERANCE), name


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
def test_ddp_finds_what_a_rank_did_not_use_beside_a_reentrant_checkpoint() -> None:
    first, second = run_ranks(2, FOREIGN + "reentrant")
    assert first == second and len(first) == 6 and min(first) > 0
