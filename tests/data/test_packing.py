"""Packing: bins as best-fit decreasing fills them, and every token of every document predicted once."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardkit.config.schema import DataConfig
from shardkit.data.corpus import open_corpus
from shardkit.data.store import LongCounts
from shardkit.data.windows import (
    IGNORE_INDEX,
    PackedDocuments,
    best_fit_decreasing,
    collate_packed,
    corpus_documents,
    plan_packed,
)
from shardkit.errors import DataError


class Given:
    """Documents in memory: document i counts up from 1000 × i, and its first `prompt` tokens are not predicted."""

    def __init__(self, lengths: list[int], prompt: int = 0) -> None:
        self.lengths, self.prompt = np.array(lengths, np.int32), prompt

    def piece(self, index: int, start: int, stop: int) -> tuple[Any, Any]:
        places = np.arange(self.lengths[index])[start:stop]
        return 1000 * index + places, places >= self.prompt


def naive(lengths: list[int], capacity: int) -> list[int]:
    """Rooms left by best-fit decreasing, item by item."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [bin for bin, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=rooms.__getitem__)] -= length
    return sorted(rooms)


def test_bins_are_those_of_best_fit_decreasing() -> None:
    draws = np.random.default_rng(0)
    for _ in range(100):
        capacity = int(draws.integers(5, 60))
        lengths = draws.integers(1, capacity + 1, int(draws.integers(1, 120)))
        items, bounds = best_fit_decreasing(lengths, capacity)
        assert sorted(items) == list(range(len(lengths)))
        assert sorted(capacity - np.add.reduceat(lengths[items], bounds[:-1])) == naive(lengths.tolist(), capacity)
    with pytest.raises(ValueError, match="capacity 4"):
        best_fit_decreasing(np.array([3, 5]), 4)


def test_a_million_lengths_take_two_seconds_and_fill_the_samples() -> None:
    lengths = np.random.default_rng(0).lognormal(6.5, 1.4, 1_000_000).astype(np.int64).clip(1, 8192)
    began = time.process_time()
    items, bounds = best_fit_decreasing(lengths, 8192)
    assert time.process_time() - began < 2
    assert lengths.sum() / ((len(bounds) - 1) * 8192) > 0.97
    again, _ = best_fit_decreasing(lengths, 8192)
    assert np.array_equal(items, again)


@pytest.mark.parametrize("packing", ["packed", "padding_free"])
def test_every_target_is_predicted_once_from_the_token_before(packing: str) -> None:
    lengths = [1, 2, 9, 40, 5, 17, 33, 16, 3]
    data = PackedDocuments(Given(lengths, prompt=2), 16, packing, "the test")
    assert (data.n_documents, data.n_cut) == (8, 2), "17 tokens are 16 inputs; 33 are two pieces of 16, 40 three"
    seen = []
    for index in range(len(data)):
        sample = data[index]
        assert sum(sample["lengths"]) == len(sample["tokens"]) <= 16
        for tokens, targets in zip(
            sample["tokens"].split(sample["lengths"]), sample["targets"].split(sample["lengths"]), strict=True
        ):
            wanted = targets != IGNORE_INDEX
            assert torch.equal(targets[wanted], tokens[wanted] + 1)
            assert torch.equal(tokens, tokens[0] + torch.arange(len(tokens))), "one document"
            seen += targets[wanted].tolist()
    assert sorted(seen) == [1000 * i + j for i, length in enumerate(lengths) for j in range(2, length)]


def test_micro_batches_say_where_their_documents_lie() -> None:
    data = PackedDocuments(Given([5, 4, 9, 6]), 8, "packed", "the test")
    samples = [data[i] for i in range(len(data))]
    batch = collate_packed(samples, 8)
    assert batch["tokens"].shape == batch["positions"].shape == (3, 8)
    assert batch["lengths"] == (4, 4, 5, 3, 8), "padding is a document of its own"
    assert batch["bounds"].tolist() == [0, 4, 8, 13, 16, 24] and batch["bounds"].dtype == torch.int32
    assert batch["positions"][1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert (batch["targets"] != IGNORE_INDEX).sum() == 20
    assert data.fill == 20 / 24
    row = collate_packed(samples, None)
    assert row["tokens"].shape == (1, 20) and row["lengths"] == (4, 5, 3, 8)
    for packing, shape in (("packed", (3, 8)), ("padding_free", (1, 24))):
        planned = plan_packed(3, 8, packing)
        assert planned.keys() == batch.keys() and planned["tokens"].shape == shape


def test_a_text_corpus_is_its_files(tmp_path: Path) -> None:
    for name, text in (("a.txt", "one two"), ("b.txt", "three"), ("c.txt", "four five six")):
        (tmp_path / name).write_text(text)
    corpus = open_corpus(DataConfig(path=str(tmp_path / "*.txt"), cache_dir=str(tmp_path / "cache")))
    documents = pickle.loads(pickle.dumps(corpus_documents(corpus, "train")))
    pieces = [documents.piece(i, 0, int(length))[0] for i, length in enumerate(documents.lengths)]
    texts = {bytes(tokens.tolist()).decode() for tokens in pieces}
    assert len(pieces) == 2 and texts < {"one two\0", "three\0", "four five six\0"}
    tokens = tmp_path / "tokens.bin"
    np.arange(100, dtype="<u2").tofile(tokens)
    with pytest.raises(DataError, match="does not say where a document ends"):
        corpus_documents(open_corpus(DataConfig(path=str(tokens), cache_dir=str(tmp_path / "cache"))), "train")
    with pytest.raises(DataError, match="no document of two tokens"):
        PackedDocuments(Given([1, 1]), 8, "packed", "the test")


@pytest.mark.parametrize("long", ["truncate", "drop"])
def test_a_sample_too_short_for_any_answer_is_named_as_the_cause(long: str) -> None:
    counts = LongCounts(truncated=7, without_target=7) if long == "truncate" else LongCounts(dropped=7)
    documents = SimpleNamespace(lengths=np.zeros(0, np.int64), long=counts)
    with pytest.raises(DataError, match=r"7 are .*, by train\.seq_len=8\n") as caught:
        PackedDocuments(documents, 8, "packed", "the training split of chats.jsonl")
    assert caught.value.fix == "raise train.seq_len, or give shorter documents"
