"""Folders and rows drawn at random: an oracle says what is predicted, or what a refusal names."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from .drawn_rows import main


@pytest.mark.parametrize(
    "first",
    [*range(0, 150, 50), *(pytest.param(first, marks=pytest.mark.slow) for first in range(150, 2150, 250))],
)
def test_drawn_rows_train_as_their_oracle_says_or_are_refused_by_their_cause(first: int) -> None:
    stories: list[str] = []
    assert main(["--seeds", f"{first}:{first + (50 if first < 150 else 250)}"], stories.append) == 0, stories
