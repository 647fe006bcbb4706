"""A few draws of the proof of `shardkit prove`, and with `-m release` all of them."""

from __future__ import annotations

import ast

import pytest

from tests.commands import python_m

from .programs import DEFECTS, FURTHER, LAYOUTS, PACKS, draw

SAVED, LEAKS = ("--until", "save"), ("--leak",)
OTHERS = ("--layouts", ",".join(FURTHER))


@pytest.mark.parametrize(
    ("layouts", "until"), [(LAYOUTS, ""), (FURTHER, ""), (LAYOUTS, "save"), (("hsdp", "pp"), "save"), (PACKS, "leak")]
)
def test_every_draw_is_a_program_and_the_same_one_each_time(layouts: tuple[str, ...], until: str) -> None:
    for seed in range(200):
        for right in (True, False):
            program = draw(seed, right=right, layouts=layouts, until=until)
            assert program == draw(seed, right=right, layouts=layouts, until=until)
            ast.parse(program.program())
            ast.parse(program.plain())
            assert (program.defect == "none") == right


def test_every_defect_is_drawn() -> None:
    drawn = {
        draw(seed, right=False, layouts=(*LAYOUTS, *FURTHER), until=until).defect
        for seed in range(len(DEFECTS))
        for until in ("", "save", "leak")
    }
    assert drawn == {defect.name for defect in DEFECTS}


@pytest.mark.parametrize(
    ("layouts", "until"), [(LAYOUTS, ""), (FURTHER, ""), (LAYOUTS, "save"), (("hsdp", "pp"), "save"), (PACKS, "leak")]
)
def test_a_defect_changes_the_program(layouts: tuple[str, ...], until: str) -> None:
    for seed in range(200):
        program = draw(seed, right=False, layouts=layouts, until=until)
        assert program.program() != program.without_defect().program(), program


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_some_draws_are_judged_right() -> None:
    """LoRA on FSDP1 with 3 ranks, one of which holds frozen weights alone, among them."""
    python_m("tests.prove.planted", "--seeds", "6:10", timeout=500, code=0)


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_an_optimizer_without_a_parameter_of_another_rank_is_found() -> None:
    python_m("tests.prove.planted", "--seeds", "59:60", "--kind", "planted", timeout=500, code=0)


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.timeout(600)
def test_a_norm_that_an_engine_computes_in_bf16_may_be_rounded() -> None:
    python_m("tests.prove.planted", "--seeds", "34:35", "--kind", "right", timeout=500, code=0)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "kind", "options"), [
    # Adam's first step is as large for both ranks' gradients of a norm that nobody reduces, so that copies stay equal.
    (287, "planted", ()),
    # The factors in bf16 are -0.98 to -1.01, few of them near enough to -1.
    pytest.param(225, "planted", (), marks=pytest.mark.deepspeed),
    # Half of a stage's gradient looked like a loss that one process adds up.
    (22, "planted", OTHERS),
    (34, "planted", OTHERS),  # the second stage is fed numbers, as the first is
    (46, "planted", OTHERS),  # four gradients of many are wrong, which no weights of micro-batches can be
    # A model that takes labels, against a loop that computes the loss.
    (29, "planted", ("--layouts", "accelerate,trainer")),
    (8, "right", SAVED),  # each stage saves a file, one while the other is still in its step
    (4, "right", SAVED),  # the program imports safetensors when it saves
    (3, "planted", SAVED),
])  # fmt: skip
def test_draws_that_were_judged_wrong_once(seed: int, kind: str, options: tuple[str, ...]) -> None:
    python_m(
        "tests.prove.planted", "--seeds", f"{seed}:{seed + 1}", "--kind", kind, "--exact", *options, timeout=500, code=0
    )


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.release
@pytest.mark.timeout(7200)  # 800 draws, which a person starts: `make test-release`
@pytest.mark.parametrize("first", range(0, 400, 50))
@pytest.mark.parametrize("options", [(), OTHERS, SAVED, LEAKS], ids=["", "others", "saved", "leak"])
def test_all_draws_are_judged_right(first: int, options: tuple[str, ...]) -> None:
    python_m("tests.prove.planted", "--seeds", f"{first}:{first + 50}", *options, timeout=7000, code=0)
