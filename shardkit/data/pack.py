"""Documents packed into samples of `train.seq_len` tokens: each token attends to its own document alone.

A document of L tokens has L - 1 inputs, each with the next token as its target: the last token is only predicted. A
document with more inputs than a sample holds is cut into pieces; neighbours share a token, so each token but the first
is predicted once, from the tokens of its piece.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..errors import DataError
from .corpus import CHUNK, SEPARATOR, Corpus, TokenSpan
from .windows import IGNORE_INDEX

Ints = npt.NDArray[np.int64]
Packing = Literal["packed", "padding_free"]


class DocumentSource(Protocol):
    """Documents of tokens; `lengths[i]` is the number of tokens of document i."""

    @property
    def lengths(self) -> npt.NDArray[Any]: ...

    def piece(self, index: int, start: int, stop: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Tokens [start, stop) of a document, and for each whether it is to be predicted from those before it."""
        ...


def best_fit_decreasing(lengths: npt.NDArray[Any], capacity: int) -> tuple[Ints, Ints]:
    """Pack items into bins: longest item first, each into the fullest bin that still has room for it.

    Items of one length and bins of one remaining room are handled together, so the time depends on the number of
    different lengths more than on the number of items. A function of `lengths` and `capacity` alone.

    Returns:
        items, bounds: bin b holds `items[bounds[b]:bounds[b + 1]]`; bins are ordered by their first item.

    Raises:
        ValueError: a length is below 1 or above `capacity`.
    """
    if len(lengths) == 0:
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    if int(lengths.min()) < 1 or int(lengths.max()) > capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()}, capacity {capacity}")
    decreasing = np.argsort(-lengths.astype(np.int64), kind="stable")
    counts = np.bincount(lengths)
    bin_of = np.empty(len(lengths), np.int64)  # by place in `decreasing`
    by_room: dict[int, list[Ints]] = {}
    rooms: list[int] = []  # the keys of `by_room`, sorted
    n_bins = placed = 0

    def put(room: int, bins: Ints) -> None:
        if len(bins) and room:
            if room not in by_room:
                by_room[room] = []
                insort(rooms, room)
            by_room[room].append(bins)

    for length in np.flatnonzero(counts)[::-1].tolist():
        n_remaining = int(counts[length])
        while n_remaining:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms.pop(at)
                bins = np.concatenate(by_room.pop(room))
            else:
                room, n_new = capacity, -(-n_remaining // (capacity // length))
                bins = np.arange(n_bins, n_bins + n_new)
                n_bins += n_new
            per_bin = room // length  # the fullest bin with room for one stays the fullest until it has none
            used = min(len(bins), -(-n_remaining // per_bin))
            filled = np.repeat(bins[:used], per_bin)[:n_remaining]
            bin_of[placed : placed + len(filled)] = filled
            n_in_last = len(filled) - (used - 1) * per_bin
            put(room - per_bin * length, bins[: used - 1])
            put(room - n_in_last * length, bins[used - 1 : used])
            put(room, bins[used:])
            placed, n_remaining = placed + len(filled), n_remaining - len(filled)
    first_item = np.full(n_bins, len(lengths))
    np.minimum.at(first_item, bin_of, decreasing)
    renamed = np.empty(n_bins, np.int64)
    renamed[np.argsort(first_item, kind="stable")] = np.arange(n_bins)
    bin_of = renamed[bin_of]
    by_bin = np.argsort(bin_of, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=n_bins))])
    return decreasing[by_bin], bounds.astype(np.int64)


def nothing_left(cause: str, documents: DocumentSource, seq_len: int) -> DataError:
    """Return the error for a split that has no document left.

    Args:
        cause: the first half of the message.
        seq_len: `train.seq_len`; the tokens of longer documents were cut off after it, or the documents left out.
    """
    counts = getattr(documents, "long", None)
    if counts is None or not str(counts):
        return DataError(cause, "give more data with text in them, or change data.val_fraction")
    reason = "are longer" if counts.dropped else "are cut before the first token that is to be predicted"
    return DataError(
        f"{cause}: {counts.dropped or counts.without_target:,} {reason}, by train.seq_len={seq_len}",
        "raise train.seq_len, or give shorter documents",
    )


class PackedDocuments:
    """Samples made of whole documents, or of pieces of those that are longer than `seq_len`.

    A sample is {"tokens": int64 [n], "targets": int64 [n], "lengths": inputs of each document in it}, n at most
    `seq_len`; `collate_packed` makes a micro-batch. `packed`: as many documents as fit; `padding_free`: one document.
    Documents of one token have nothing to predict and are left out.

    Attributes:
        n_documents, n_cut, n_pieces: documents with a target, those that were cut, and all pieces.
        fill: share of the positions that hold a document's tokens.
        context: inputs of a token's document (or piece), on average over the tokens.

    Raises:
        DataError: no document has two tokens.
    """

    def __init__(self, documents: DocumentSource, seq_len: int, packing: Packing, name: str) -> None:
        self.documents, self.seq_len, self.name = documents, seq_len, name
        inputs = np.asarray(documents.lengths, np.int64) - 1
        with_target = np.flatnonzero(inputs > 0)
        if not len(with_target):
            raise nothing_left(f"{name} has no document of two tokens or more", documents, seq_len)
        n_pieces = -(-inputs[with_target] // seq_len)
        self._document = np.repeat(with_target, n_pieces)
        nth = np.arange(len(self._document)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
        self._start = nth * seq_len
        self._inputs = np.minimum(inputs[self._document] - self._start, seq_len)
        self.n_documents, self.n_pieces = len(with_target), len(self._document)
        self.n_cut = int((n_pieces > 1).sum())
        self.context = float(np.square(self._inputs.astype(np.float64)).sum() / self._inputs.sum())
        if packing == "packed":
            self._pieces, self._bounds = best_fit_decreasing(self._inputs, seq_len)
            self.fill = float(self._inputs.sum() / (len(self) * seq_len))
        else:
            self._pieces, self._bounds = np.arange(self.n_pieces), np.arange(self.n_pieces + 1)
            self.fill = 1.0

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def n_tokens(self) -> int:
        """Inputs of all documents."""
        return int(self._inputs.sum())

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        tokens, targets, lengths = [], [], []
        for piece in self._pieces[self._bounds[index] : self._bounds[index + 1]].tolist():
            start, n = int(self._start[piece]), int(self._inputs[piece])
            piece_tokens, is_target = self.documents.piece(int(self._document[piece]), start, start + n + 1)
            tokens.append(piece_tokens[:-1])
            targets.append(np.where(is_target[1:], piece_tokens[1:], IGNORE_INDEX))
            lengths.append(n)
        return {
            "tokens": torch.from_numpy(np.concatenate(tokens)), "targets": torch.from_numpy(np.concatenate(targets)),
            "lengths": lengths,
        }  # fmt: skip

    def describe(self) -> str:
        """One line: documents, samples, and how full these are."""
        cut = f" ({self.n_cut:,} longer than {self.seq_len} cut into pieces)" if self.n_cut else ""
        noun = getattr(self.documents, "noun", "documents")
        return f"{self.name}: {self.n_documents:,} {noun}{cut} in {len(self):,} samples, {self.fill:.1%} full"


def collate_packed(samples: Sequence[dict[str, Any]], seq_len: int | None) -> dict[str, Any]:
    """A micro-batch of samples: one row of `seq_len` each, padded at its end; or all in one row (`seq_len=None`).

    Returns:
        "tokens", "targets" and "positions", int64 [rows, T]; "bounds", int32 [n + 1]: document d takes the places
        [bounds[d], bounds[d + 1]) of the flattened rows; "lengths", the same as a tuple of n integers. Padding, token
        0 with target `IGNORE_INDEX`, is a document of its own.
    """
    lengths: list[int] = []
    tokens, targets = [], []
    for sample in samples:
        missing = 0 if seq_len is None else seq_len - len(sample["tokens"])
        lengths += [*sample["lengths"], *([missing] if missing else [])]
        tokens.append(torch.nn.functional.pad(sample["tokens"], (0, missing)))
        targets.append(torch.nn.functional.pad(sample["targets"], (0, missing), value=IGNORE_INDEX))
    rows = (1, -1) if seq_len is None else (len(samples), seq_len)
    return {"tokens": torch.cat(tokens).view(rows), "targets": torch.cat(targets).view(rows)} | places(lengths, rows)


def places(lengths: Sequence[int], rows: tuple[int, int]) -> dict[str, Any]:
    """Where documents of these lengths lie in rows of tokens: see `collate_packed`."""
    sizes = np.asarray(lengths, np.int64)
    ends = sizes.cumsum()
    positions = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    bounds = np.concatenate([[0], ends]).astype(np.int32)
    return {
        "positions": torch.from_numpy(positions).view(rows), "bounds": torch.from_numpy(bounds),
        "lengths": tuple(sizes.tolist()),
    }  # fmt: skip


def plan_packed(n: int, seq_len: int, packing: Packing) -> dict[str, Any]:
    """A micro-batch of `n` samples without data, in its largest form: documents as long as a sample."""
    rows = (n, seq_len) if packing == "packed" else (1, n * seq_len)
    empty = torch.zeros(rows, dtype=torch.int64)
    return {"tokens": empty, "targets": empty.clone()} | places([seq_len] * n, rows)


class CorpusDocuments:
    """The documents of a text corpus read as bytes: each ends with the separator, which is predicted too."""

    def __init__(self, span: TokenSpan) -> None:
        self.span = span
        tokens = span.tokens
        ends = [
            np.flatnonzero(tokens[start : start + CHUNK] == SEPARATOR) + start + 1
            for start in range(0, len(tokens), CHUNK)
        ]
        self._bounds = np.unique(np.concatenate([[0], *ends, [len(tokens)]]))

    @property
    def lengths(self) -> Ints:
        return np.diff(self._bounds)

    def piece(self, index: int, start: int, stop: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        begin = int(self._bounds[index])
        tokens = self.span.tokens[begin + start : begin + stop].astype(np.int64)
        return tokens, np.ones(len(tokens), np.bool_)


def corpus_documents(corpus: Corpus, split: Literal["train", "val"]) -> CorpusDocuments:
    """The documents of a split.

    Raises:
        DataError: the corpus is a `.bin`, which does not say where a document ends.
    """
    if corpus.source.endswith(".bin"):
        raise DataError(
            f"data.packing packs documents, but {corpus.source} does not say where a document ends",
            "set data.packing=none, or give text",
        )
    return CorpusDocuments(corpus.span(split))


def documents_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The argument that tells a model a packed batch's documents; nothing for windows."""
    if "bounds" not in batch:
        return {}
    return {"documents": (batch["positions"], batch["bounds"], batch["lengths"])}
