"""The losses of the built-in tasks are those that were recorded: `python -m tests.tasks.golden` records them anew."""

from __future__ import annotations

from tests.tasks.golden import differences, golden, measured


def test_the_losses_are_the_golden_ones() -> None:
    assert differences(measured(), golden()) == []
