"""A few draws of the proof of `shardkit prove`, and with `-m release` all of them."""

from __future__ import annotations

import ast

import pytest

from tests.commands import python_m

from .programs import DEFECTS, draw


def test_every_draw_is_a_program_and_the_same_one_each_time() -> None:
    for seed in range(200):
        for right in (True, False):
            program = draw(seed, right=right)
            assert program == draw(seed, right=right)
            ast.parse(program.program())
            ast.parse(program.plain())
            assert (program.defect == "none") == right


def test_every_defect_is_drawn() -> None:
    assert {draw(seed, right=False).defect for seed in range(len(DEFECTS))} == {defect.name for defect in DEFECTS}


def test_a_defect_changes_the_program() -> None:
    for seed in range(200):
        program = draw(seed, right=False)
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
@pytest.mark.deepspeed
@pytest.mark.release
@pytest.mark.timeout(7200)  # 800 draws, which a person starts: `make test-release`
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_all_draws_are_judged_right(first: int) -> None:
    python_m("tests.prove.planted", "--seeds", f"{first}:{first + 50}", timeout=7000, code=0)
