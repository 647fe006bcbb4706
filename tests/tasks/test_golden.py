"""The losses of the built-in tasks are those that were recorded: `python -m tests.tasks.golden` records them anew."""

from __future__ import annotations

import copy

import pytest

from tests.tasks.golden import differences, golden, measured


@pytest.mark.dist
def test_the_losses_are_the_golden_ones() -> None:
    pytest.importorskip("transformers")
    assert differences(measured(), golden()) == []


def test_a_loss_that_moved_or_is_gone_is_named() -> None:
    kept = golden()
    moved = copy.deepcopy(kept)
    moved["debug"][1]["loss"] += 1e-3
    del moved["vit"][0]["grad_norm"]
    said = differences(moved, kept)
    assert len(said) == 2 and said[0].startswith("debug, step 2: loss ") and "vit, step 1: grad_norm None" in said[1]
