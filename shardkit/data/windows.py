"""Fixed-length windows over a stream of tokens, plain or masked (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..config.libraries import is_first_rank
from ..config.schema import RunConfig
from ..errors import ConfigError, DataError
from .corpus import CHUNK, SEPARATOR, Corpus, TokenSpan, open_corpus
from .loader import generator_of
from .store import Documents
from .tokenizer import FILES

IGNORE_INDEX = -100
_BYTE_VOCABULARY = 512
"""A vocabulary of bytes and some special tokens is not larger than this."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_LOG = logging.getLogger(__name__)


class Windows:
    """Non-overlapping windows: sample i is tokens[i·T : i·T + T + 1], as inputs and the next tokens.

    A sample is {"tokens": int64 [T], "targets": int64 [T]}. The last window may be shorter: it is padded with token 0
    and targets `IGNORE_INDEX`, so every token except the first is predicted exactly once per epoch.
    """

    def __init__(self, span: TokenSpan, seq_len: int, name: str, min_tokens: int | None = None) -> None:
        _refuse_short(name, len(span), min_tokens, seq_len)
        self.span = span
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.span) - 2) // self.seq_len + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.seq_len
        return _inputs_and_targets(self.span.tokens[start : start + self.seq_len + 1].astype(np.int64), self.seq_len)


def _refuse_short(name: str, n_tokens: int, min_tokens: int | None, seq_len: int) -> None:
    needed = seq_len + 1 if min_tokens is None else min_tokens
    if n_tokens < needed:
        raise DataError(
            f"{name} has {n_tokens} tokens, fewer than the {needed} that train.seq_len={seq_len} needs",
            "give more data, lower train.seq_len, or change data.val_fraction",
        )


def _inputs_and_targets(window: npt.NDArray[np.int64], seq_len: int) -> dict[str, torch.Tensor]:
    """A window's inputs and next tokens; a short one is padded."""
    tokens = torch.from_numpy(window)
    missing = seq_len + 1 - len(window)
    tokens, targets = tokens[:-1], tokens[1:]
    if missing:
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        targets = torch.nn.functional.pad(targets, (0, missing), value=IGNORE_INDEX)
    return {"tokens": tokens, "targets": targets}


class DocumentWindows:
    """Windows over documents one behind the other, in their order, as `Windows` takes them over a stream of tokens."""

    def __init__(self, documents: Documents, seq_len: int, name: str, min_tokens: int | None = None) -> None:
        self.documents, self.seq_len = documents, seq_len
        _refuse_short(name, documents.n_tokens, min_tokens, seq_len)

    @cached_property
    def _stops(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.documents.lengths, dtype=np.int64)

    def __len__(self) -> int:
        return (int(self._stops[-1]) - 2) // self.seq_len + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        at = index * self.seq_len
        stop = min(at + self.seq_len + 1, int(self._stops[-1]))
        document = int(np.searchsorted(self._stops, at, side="right"))
        parts = []
        while at < stop:
            end, length = int(self._stops[document]), int(self.documents.lengths[document])
            start = length - (end - at)
            parts.append(self.documents.piece(document, start, start + min(end, stop) - at)[0])
            at, document = min(end, stop), document + 1
        return _inputs_and_targets(np.concatenate(parts), self.seq_len)

    def __getstate__(self) -> dict[str, Any]:
        return {"documents": self.documents, "seq_len": self.seq_len}


def open_covered(config: RunConfig, vocab_size: int, key: str, reserved: int = 0) -> Corpus:
    """Open the corpus and check that its tokens are below `vocab_size - reserved`; `key` sets the vocabulary size."""
    if config.data.path is None or not config.data.path.endswith(".bin"):
        _judge_bytes(config.model.init_from, vocab_size, key)
    corpus = open_corpus(config.data)
    if corpus.max_token >= vocab_size - reserved:
        beside = f", of which the last {reserved} is reserved" if reserved else ""
        raise ConfigError(
            f"{key}={vocab_size}{beside}, but {corpus.source} holds the token {corpus.max_token}",
            f"set {key} to at least {corpus.max_token + 1 + reserved}, or check data.bin_dtype",
        )
    return corpus


def _judge_bytes(init_from: str | None, vocab_size: int, key: str) -> None:
    """Refuse text, one token per byte, for weights that learnt a tokenizer's ids; warn of an oversized vocabulary."""
    folder = Path(init_from).expanduser() if init_from is not None else None
    tokenizer = next((name for name in _TOKENIZERS if folder is not None and (folder / name).exists()), None)
    is_foreign = folder is not None and (folder / "config.json").exists()
    if tokenizer is not None or (is_foreign and vocab_size > _BYTE_VOCABULARY):
        missing = f"no tokenizer.json in {folder}: "
        if tokenizer in FILES:
            missing = f"model.init_from={init_from}: made by the tokenizer beside them ({tokenizer}), "
        raise ConfigError(
            f"{missing}these weights know token ids, but data.path is text, which is read without a tokenizer, as "
            "bytes",
            "set data.tokenizer to the tokenizer of these weights, or data.path to a .bin file of token ids",
        )
    if vocab_size > _BYTE_VOCABULARY and is_first_rank():
        _LOG.warning(
            "text is read as bytes: of the %s tokens of %s only 256 occur; give token ids as a .bin, or set %s=256",
            f"{vocab_size:,}", key, key,
        )  # fmt: skip


HIDDEN, SWAPPED = 0.8, 0.1
"""Shares of the chosen positions that get the mask token, and a random token; the rest stay unchanged."""


class MaskedWindows:
    """Windows with a share of their tokens masked, chosen by (seed, split, sample index) alone.

    A sample is {"tokens": int64 [T], "targets": int64 [T]}: the targets are the original tokens where a prediction is
    wanted and `IGNORE_INDEX` elsewhere. The last, shorter window is padded with token 0, which is never a target.
    Random replacements are drawn from [0, n_tokens).
    """

    def __init__(self, windows: Any, seed: int, split: str, fraction: float, mask_token: int, n_tokens: int) -> None:
        self.windows = windows
        self.seed, self.split = seed, split
        self.fraction, self.mask_token, self.n_tokens = fraction, mask_token, n_tokens

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index]
        tokens = window["tokens"].numpy()
        real = int((window["targets"] != IGNORE_INDEX).sum())  # as many inputs as next tokens; the rest is padding
        draws = generator_of(self.seed, "mask", self.split, index)
        chosen = draws.random(len(tokens)) < self.fraction
        chosen[real:] = False
        how, random_tokens = draws.random(len(tokens)), draws.integers(0, self.n_tokens, len(tokens))
        changed = np.where(how < HIDDEN, self.mask_token, np.where(how < HIDDEN + SWAPPED, random_tokens, tokens))
        return {
            "tokens": torch.from_numpy(np.where(chosen, changed, tokens)),
            "targets": torch.from_numpy(np.where(chosen, tokens, IGNORE_INDEX)),
        }


def flatten_targets(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A micro-batch: "tokens" [B, T], "positions" [n] to predict in the flattened B × T, and their "targets" [n].

    They are found here, on the host: on the GPU, this would make the host wait.
    """
    targets = torch.stack([sample["targets"] for sample in samples]).flatten()
    positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    tokens = torch.stack([sample["tokens"] for sample in samples])
    return {"tokens": tokens, "positions": positions, "targets": targets[positions]}


# Documents packed into samples of `train.seq_len` tokens: each token attends to its own document alone.
# A document of L tokens has L - 1 inputs, each with the next token as its target: the last token is only predicted. A
# document with more inputs than a sample holds is cut into pieces; neighbours share a token, so each token but the
# first is predicted once, from the tokens of its piece.

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

    Returns items and bounds: bin b holds `items[bounds[b]:bounds[b + 1]]`; bins are ordered by their first item.
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
    """The error for a split that has no document left, with the reason that the documents' counts give."""
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
    Documents of one token have nothing to predict and are left out. `n_documents`, `n_cut` and `n_pieces` count those
    with a target, those that were cut, and all pieces. `fill`: share of the positions that hold a document's tokens.
    `context`: inputs of a token's document (or piece), on average over the tokens.
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

    It has "tokens", "targets" and "positions", int64 [rows, T]; "bounds", int32 [n + 1]: document d takes the places
    [bounds[d], bounds[d + 1]) of the flattened rows; "lengths", the same as a tuple of n integers. Padding, token 0
    with target `IGNORE_INDEX`, is a document of its own.
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


def split_rows(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The positions rank, rank + size, rank + 2 · size, … of each row of a micro-batch: targets are spread evenly over
    the ranks, wherever they stand. Documents stay described by the whole rows, since a rank's attention has all
    positions of a share of the heads.

    Rows are padded to a multiple of `size` with a document of token 0 that has no targets. Where there were no
    documents, each row is one.
    """
    tokens, targets = batch["tokens"], batch["targets"]
    rows, length = tokens.shape
    missing = -length % size
    lengths: list[int] = []
    end = 0
    for n in batch.get("lengths", [length] * rows):
        lengths.append(n)
        end += n
        if missing and end % length == 0:
            lengths.append(missing)
    padded = {
        "tokens": torch.nn.functional.pad(tokens, (0, missing)),
        "targets": torch.nn.functional.pad(targets, (0, missing), value=IGNORE_INDEX),
        **places(lengths, (rows, length + missing)),
    }
    split = ["tokens", "targets", "positions"]
    if "real" in batch:
        padded["real"] = torch.nn.functional.pad(batch["real"], (0, missing))
        split.append("real")
    shares = {key: padded[key][:, rank::size].contiguous() for key in split}
    return {**padded, **shares}


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
    """The documents of a split."""
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
