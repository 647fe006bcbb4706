"""Rows of several ranks: united as one process draws them, and seen where they repeat."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shardkit.prove import rows
from shardkit.prove.judge import Judge
from shardkit.prove.replay import Proof
from shardkit.prove.rows import COPIES, DIFFERENT, SAME, SPLIT, Feed
from shardkit.prove.runs import INJECT


def record(draws: list[list[int]], n_backwards: int, n_yielded: int | None = None, **fields: Any) -> dict[str, Any]:
    batches = [
        [{"row": str(row), "tokens": {"x": [row]}, "cut": {}, "targets": 1} for row in draw]
        for draw in draws[:n_backwards]
    ]
    return {
        "draws": {"0": draws}, "calls": n_backwards, "yielded": {"0": n_backwards if n_yielded is None else n_yielded},
        "backwards": [None] * n_backwards, "raw": {}, "rows": batches, "epoch": {"0": []}, **fields,
    }  # fmt: skip


def test_the_ranks_rows_are_united_by_micro_batch() -> None:
    feed = Feed(0, ({(0, 0): [0, 1], (0, 1): [2, 3], (1, 0): [4, 5], (1, 1): [6, 7]},))
    assert feed.united(0) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert feed.united(0, 1) == [[0, 1, 4, 5, 2, 3, 6, 7]]


@pytest.mark.parametrize(("lists", "united"), [
    ([[0, 1], [2, 3]], [0, 1, 2, 3]), ([[0, 1], [0, 1]], [0, 1]), ([[0], [0], [1], [1]], [0, 1]),
    ([[0], [0], [1]], [0, 0, 1]),
])  # fmt: skip
def test_ranks_that_share_rows_draw_them_once(lists: list[list[int]], united: list[int]) -> None:
    assert rows.unite(lists) == united


def test_a_loop_may_hold_a_batch_ahead() -> None:
    ahead = [record([[0], [1]], 1, n_yielded=2), record([[0], [1], [2]], 1, n_yielded=3)]
    feed = rows.drawn([{0: ahead[0]}, {0: ahead[1]}])
    assert feed is not None and feed.steps == ({(0, 0): [0]}, {(0, 0): [1]})


def test_several_backwards_may_share_a_batch() -> None:
    steps = [record([[0]], 2, n_yielded=1), record([[0], [1]], 2, n_yielded=2)]
    feed = rows.drawn([{0: steps[0]}, {0: steps[1]}])
    assert feed is not None and feed.steps == ({(0, 0): [0]}, {(0, 0): [1]})


@pytest.mark.parametrize(("ranks", "kind"), [
    ([[[0], [1]]], SAME), ([[[0, 1]], [[0, 1]]], COPIES), ([[[0]], [[2]]], DIFFERENT),
])  # fmt: skip
def test_the_rows_that_modules_see(ranks: list[list[list[int]]], kind: str) -> None:
    parallel = {rank: record(draws, len(draws)) for rank, draws in enumerate(ranks)}
    assert rows.compare(parallel, {0: record([[0, 1]], 1)})[0] == kind


@pytest.mark.parametrize(("labels", "targets"), [([[-100, 3, 4]], 2), ([1], None)])
def test_labels_are_tokens_or_one_class_a_row(
    monkeypatch: pytest.MonkeyPatch, labels: list[Any], targets: int | None
) -> None:
    monkeypatch.syspath_prepend(str(INJECT))
    rows_of = importlib.import_module("shardkit_proof").rows_of
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor(labels)}
    assert [row["targets"] for row in rows_of((), inputs)] == [targets]
    others = {"positions": torch.tensor([[0, 1, 2]]), "again": inputs["input_ids"]}
    assert rows_of((), {**inputs, **others}) == rows_of((), inputs)


@pytest.mark.parametrize(("whole", "kind"), [
    ([1, 2, 3, 4, 7, 7, 7, 7], SPLIT), ([1, 2, 3, 5, 7, 7, 7, 7], DIFFERENT),
    ([1, 2, 3, 4, 7, 7, 7, 7, 6], DIFFERENT),
])  # fmt: skip
def test_a_row_split_between_ranks_is_not_another_row(
    monkeypatch: pytest.MonkeyPatch, whole: list[int], kind: str
) -> None:
    """Its end may be padding, and the ranks may be given positions that one process computes by itself."""
    monkeypatch.syspath_prepend(str(INJECT))
    rows_of = importlib.import_module("shardkit_proof").rows_of

    def saw(*args: list[int]) -> dict[str, Any]:
        return {"raw": {}, "backwards": [None], "rows": [rows_of([torch.tensor([arg]) for arg in args], {})]}

    row = [1, 2, 3, 4, 7, 7, 7, 7]
    ranks = {rank: saw(row[rank::2], [rank, 2 + rank, 4 + rank, 6 + rank]) for rank in range(2)}
    assert rows.compare(ranks, {0: saw(whole)})[0] == kind
    assert rows.compare({0: saw([1, 3]), 1: saw([2, 0])}, {0: saw([1, 2, 3])})[0] == SPLIT, "an odd row is padded"


def test_a_later_stage_of_a_pipeline_sees_activations() -> None:
    stage = {
        "raw": {"head": None},
        "backwards": [None],
        "rows": [[{"row": "activation", "tokens": {}, "cut": {}, "targets": None}]],
    }
    first = {
        "raw": {"embed": None},
        "backwards": [None],
        "rows": [[{"row": "a", "tokens": {}, "cut": {}, "targets": 1}]],
    }
    assert rows.compare({0: first, 1: stage}, {0: first})[0] == SAME
    assert rows.compare({0: first, 1: {**stage, "raw": first["raw"]}}, {0: first})[0] == DIFFERENT  # a rank's rows
    assert rows.compare({0: first, 1: stage}, {0: record([[0], [1]], 2)})[0] == DIFFERENT
    assert rows.fed({0: first, 1: stage}, {0: first}).keys() == {0}


def test_a_stage_that_learns_its_shapes_from_its_first_rows_does_not_repeat_them() -> None:
    stage = record([[0], [0], [1]], 3)
    process = {0: record([[0, 1]], 1)}
    assert rows.compare({0: {**stage, "backwards": [None, None]}}, process)[0] == SAME
    assert rows.compare({0: stage}, process)[0] != SAME


@pytest.mark.parametrize(("sizes", "is_same"), [([1, 1], True), ([1, 1, 1], True), ([2], False), ([1, 2], False)])
def test_a_later_stage_batches_as_one_process_does(sizes: list[int], is_same: bool) -> None:
    """It may learn shapes by a first call; a stage that joins micro-batches lets their rows act on each other."""
    process = {**record([[0], [1]], 2), "raw": {"embed": None, "head": None}}
    activations = {"row": "activation", "tokens": {}, "cut": {}, "targets": None}
    stage = {"raw": {"head": None}, "backwards": [None] * 2, "rows": [[activations] * size for size in sizes]}
    judge = Judge.__new__(Judge)
    judge.kinds = {1: (SAME, "")}
    ranks = {0: {**process, "raw": {"embed": None}}, 1: stage}
    judge.proof = cast(
        Proof,
        SimpleNamespace(
            side=lambda _: SimpleNamespace(records={0: process}), parallel=SimpleNamespace(record=lambda _: ranks)
        ),
    )
    assert judge._has_same_batches(1) == is_same


def test_labels_that_only_one_program_gives_to_its_module_make_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(INJECT))
    rows_of = importlib.import_module("shardkit_proof").rows_of
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    trainer = {0: {"raw": {}, "backwards": [None], "rows": [rows_of((), {"input_ids": ids, "labels": ids})]}}
    loop, other = ({0: {"raw": {}, "backwards": [None], "rows": [rows_of((tensor,), {})]}} for tensor in (ids, ids + 1))
    assert rows.compare(trainer, loop)[0] == SAME
    assert rows.compare(trainer, other)[0] == DIFFERENT


def repeated(draws: list[list[int]], seen: list[list[int]], group: list[int] | None, part: bool = False) -> list[str]:
    start = {
        rank: {"group": group, "weights": {"w": {"offset": None, "hash": str(rank * part)}}}
        for rank in range(len(draws))
    }
    records = {rank: record([numbers], 1) for rank, numbers in enumerate(seen)}
    return rows.repeated(Feed(0, ({(rank, 0): draw for rank, draw in enumerate(draws)},)), [records], start)


@pytest.mark.parametrize(("draws", "seen", "group", "part", "repeats"), [
    ([[0], [1]], [[0], [1]], [0, 1], False, False),
    ([[0], [0]], [[0], [0]], [0, 1], False, True),  # no DistributedSampler
    ([[0], [0]], [[0], [0]], None, False, True),  # averaged by hand
    ([[0], [0]], [[0], [0]], None, True, False),  # tensor parallelism: each holds a part of the weights
    ([[0], [0]], [[5], [6]], [0, 1], False, False),  # context parallelism: each sees a part of the row
    ([[0], [0], [1], [1]], [[5], [6], [7], [8]], [0, 1, 2, 3], False, False),  # two groups of it
    ([[0], [0], [0], [0]], [[5], [6], [5], [6]], [0, 1, 2, 3], False, True),
    ([[0, 1], [1, 2]], [[0, 1], [1, 2]], [0, 1], False, True),
    ([[0], [0], [1], [1]], [[0], [0], [1], [1]], [0, 2], False, False),  # in pairs of tensor parallelism
])  # fmt: skip
def test_rows_repeat_only_where_gradients_are_averaged(
    draws: list[list[int]], seen: list[list[int]], group: list[int] | None, part: bool, repeats: bool
) -> None:
    assert bool(repeated(draws, seen, group, part)) == repeats


def test_an_epoch_tells_rows_that_each_rank_samples_from_all() -> None:
    feed = Feed(0, ({(0, 0): [0], (1, 0): [1]},))
    apart = {rank: record([[]], 0, epoch={"0": [list(range(rank, 100, 2))]}) for rank in range(2)}
    both = {rank: record([[]], 0, epoch={"0": [list(range(rank, 100))]}) for rank in range(2)}
    process = {0: record([[]], 0, epoch={"0": [list(range(100))]})}
    half = {rank: record([[]], 0, epoch={"0": [list(range(rank, 50, 2))]}) for rank in range(2)}
    assert rows.over_the_epoch(feed, apart, process) == []
    assert "another rank draws too" in rows.over_the_epoch(feed, both, process)[0]
    assert "no rank draws 50 of 100" in rows.over_the_epoch(feed, half, process)[0]
