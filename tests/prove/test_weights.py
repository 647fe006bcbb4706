"""The weight table names accumulation, tokens and missing ranks, and sees rows that interact."""

from __future__ import annotations

import pytest

from shardkit.prove.weights import WeightTable

FOUR = ((0, 0), (0, 1), (1, 0), (1, 1))


def table(
    parallel: list[float], process: list[float], remaining: float = 0.0, process_remaining: float = 0.0
) -> WeightTable:
    return WeightTable(FOUR, tuple(parallel), tuple(process), remaining, process_remaining, 1e-5, (None,) * 4)


@pytest.mark.parametrize(("parallel", "process", "words"), [
    ([0, 0.5, 0, 0.5], [0.25] * 4, "only the last micro-batch of a step counts"),
    ([0.5, 0, 0.5, 0], [0.25] * 4, "only the first micro-batch of a step counts"),
    ([0.25, 0.25, 0, 0], [0.25] * 4, "only the rows of rank 0 count"),
    ([0.25, 0.25, 0, 0.25], [0.25] * 4, "only rank 0 micro-batch 1, rank 0 micro-batch 2, rank 1 micro-batch 2 count"),
    ([0.25] * 4, [0.1, 0.2, 0.3, 0.4], "each micro-batch weighs alike"),
    ([1 / 6, 1 / 3, 3 / 14, 2 / 7], [0.1, 0.2, 0.3, 0.4], "each rank weighs alike"),
    ([0.15, 0.15, 0.35, 0.35], [0.1, 0.2, 0.3, 0.4], "ranks weigh by their targets"),
    ([0.25, 0.25, 0.5, 0.5], [0.25] * 4, "each rank's gradient by another factor: rank 0 x1, rank 1 x2"),
])  # fmt: skip
def test_words(parallel: list[float], process: list[float], words: str) -> None:
    assert table(parallel, process).words().startswith(words)


def test_a_gradient_that_is_no_weighted_sum_is_wrong_inside_the_backward() -> None:
    assert "inside the backward" in table([0.25] * 4, [0.25] * 4, remaining=0.3).words()


def test_rows_interact_where_one_process_is_no_sum_of_its_rows() -> None:
    assert table([0.25] * 4, [0.25] * 4, process_remaining=1e-3).rows_interact
    assert not table([0.25] * 4, [0.25] * 4, remaining=0.3, process_remaining=1e-6).rows_interact


def test_a_sum_loss_adds_up_where_ranks_average() -> None:
    assert table([0.25] * 4, [0.5] * 4).is_sum_loss and not table([0.125] * 4, [0.25] * 4).is_sum_loss


def test_one_process_adds_up_nothing_where_ranks_share_their_rows() -> None:
    """Two stages of a pipeline, of which one has half of its gradient."""
    assert not WeightTable(((0, 0),), (0.7,), (1.0,), 0.3, 0.0, 1e-5, (None,)).is_sum_loss
