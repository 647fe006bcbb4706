"""A tokenised corpus with the bounds of its documents, memory-mapped, and the samples that training takes from it.

A corpus is a directory: `tokens.bin` (uint16 or uint32, little endian), `bounds.bin` (int64 [n + 1]: document i is
tokens[bounds[i] : bounds[i + 1]]), `places.bin` (uint64 [n]: a hash of each document's text, which decides its split),
`targets.bin` (one bit a token, little bit order; absent if every token is to be predicted), and `meta.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .cache import tail_size

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
TOKENS, BOUNDS, PLACES, TARGETS = "tokens.bin", "bounds.bin", "places.bin", "targets.bin"
Split = Literal["train", "val"]
LongSamples = Literal["truncate", "split", "drop"]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Store:
    """One tokenised source on disk.

    Attributes:
        source: its name.
        dtype: of the tokens, `<u2` or `<u4`.
        masked: only some tokens are to be predicted, and `targets.bin` says which.
        kind: the columns that its rows had: text, messages or prompt.
    """

    directory: str
    source: str
    dtype: str
    masked: bool
    kind: str = "text"

    def map(self, name: str, dtype: str) -> npt.NDArray[Any]:
        path = Path(self.directory) / name
        return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


@dataclass(frozen=True)
class Choice:
    """Which documents of a corpus are wanted, and what happens to those longer than `max_tokens`.

    truncate keeps a document's start; split cuts it into pieces that share one token, so that each token but the first
    is predicted once; drop leaves it out. A piece without any token to predict is left out too.

    Attributes:
        split: None = all documents.
        val_fraction: share of the documents, by the hash of their text, that are validation data.
        max_tokens: None = documents stay whole.
    """

    split: Split | None = None
    val_fraction: float = 0.0
    max_tokens: int | None = None
    long: LongSamples = "truncate"


@dataclass
class LongCounts:
    """What became of the documents longer than a sample: documents, and the tokens that were left out."""

    truncated: int = 0
    split: int = 0
    dropped: int = 0
    without_target: int = 0
    tokens_left_out: int = 0
    documents: int = 0
    """All documents, of any length."""

    def __str__(self) -> str:
        outcomes = [f"{count:,} {name}" for name in ("truncated", "split", "dropped") if (count := getattr(self, name))]
        if self.without_target:
            outcomes.append(f"{self.without_target:,} left out with no target in them")
        return f"{', '.join(outcomes)} ({self.tokens_left_out:,} tokens left out)" if outcomes else ""


class Documents:
    """One split of one or several tokenised sources. Memory-mapped; a pickle holds names alone and maps anew.

    A sample is {"tokens": int64 [L], "is_target": bool [L]}: `is_target[j]` says that token j is to be predicted from
    the tokens before it; token 0 never counts.

    Attributes:
        sources: names of the sources.
        source_of: uint8 [n], the index of each document's source.
        lengths: int32 [n], tokens of each document.
        long: what became of documents that were too long.
    """

    def __init__(self, stores: Sequence[Store], choice: Choice = Choice()) -> None:
        self.stores, self.choice = tuple(stores), choice
        self.sources = tuple(store.source for store in self.stores)
        self._open()

    def _open(self) -> None:
        self.long = LongCounts()
        chosen = [_choose(store, self.choice, self.long) for store in self.stores]
        self._starts: Integers = np.concatenate([starts for starts, _ in chosen])
        self.lengths = np.concatenate([lengths for _, lengths in chosen]).astype(np.int32)
        sizes = [len(starts) for starts, _ in chosen]
        self.source_of = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
        self._tokens = [store.map(TOKENS, store.dtype) for store in self.stores]
        self._targets = [store.map(TARGETS, "u1") if store.masked else None for store in self.stores]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def noun(self) -> str:
        """The name of what the documents were: conversations, prompts with completions, or documents of any kind."""
        kinds = {store.kind for store in self.stores}
        names = {"messages": "conversations", "prompt": "prompts with completions"}
        return names.get(kinds.pop(), "documents") if len(kinds) == 1 else "documents"

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import torch  # here: processes that write a corpus do without it

        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        tokens, is_target = self.piece(index, 0, int(self.lengths[index]))
        is_target[0] = False
        return {"tokens": torch.from_numpy(tokens), "is_target": torch.from_numpy(is_target)}

    def piece(self, index: int, start: int, stop: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Tokens [start, stop) of a document and which of them are to be predicted, its first one included."""
        source = self.source_of[index]
        begin = int(self._starts[index])
        start, stop = begin + start, begin + stop
        tokens = self._tokens[source][start:stop].astype(np.int64)
        bits = self._targets[source]
        if bits is None:
            return tokens, np.ones(len(tokens), dtype=np.bool_)
        return tokens, _unpack(bits, start, stop)

    def of_source(self, index: int) -> Documents:
        return Documents(self.stores[index : index + 1], self.choice)

    def __getstate__(self) -> dict[str, Any]:
        return {"stores": self.stores, "choice": self.choice, "sources": self.sources}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _unpack(bits: npt.NDArray[np.uint8], start: int, stop: int) -> npt.NDArray[np.bool_]:
    first_byte = start // 8
    unpacked = np.unpackbits(bits[first_byte : -(-stop // 8)], bitorder="little")
    return unpacked[start - 8 * first_byte : stop - 8 * first_byte].astype(np.bool_)


def _choose(store: Store, choice: Choice, counts: LongCounts) -> tuple[Integers, Integers]:
    """Start and length of each wanted piece of a store, in the order of the documents."""
    bounds = np.asarray(store.map(BOUNDS, "<i8"), dtype=np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    if choice.split is not None and len(starts) == 1:
        tail = 0 if store.masked else tail_size(int(lengths[0]), choice.val_fraction)
        split_lengths = lengths - tail if choice.split == "train" else np.full(1, tail)
        starts, lengths = (starts if choice.split == "train" else starts + lengths - tail), split_lengths
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    elif choice.split is not None:
        in_split = is_held_out(store.map(PLACES, "<u8"), choice.val_fraction) == (choice.split == "val")
        starts, lengths = starts[in_split], lengths[in_split]
    counts.documents += len(starts)
    if choice.max_tokens is not None:
        starts, lengths = _shorten(store, starts, lengths, choice.max_tokens, choice.long, counts)
    return starts, lengths


def is_held_out(places: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents validate: those whose hash falls in the first `fraction`. Neither part is empty, unless it is 0.

    Documents of equal text fall into the same part, and a document stays in its part when others come or go.
    """
    is_val: npt.NDArray[np.bool_] = places < np.uint64(int(fraction * 2**64))
    if not fraction:
        return is_val
    if len(places) > 1 and not is_val.any():
        is_val[int(places.argmin())] = True
    elif len(places) > 1 and is_val.all():
        is_val[int(places.argmax())] = False
    return is_val


def _shorten(
    store: Store, starts: Integers, lengths: Integers, most: int, how: LongSamples, counts: LongCounts
) -> tuple[Integers, Integers]:
    """Pieces of at most `most` tokens (at least 2)."""
    long = lengths > most
    n_long = int(long.sum())
    if not n_long:
        return starts, lengths
    before = int(lengths.sum())
    if how == "split":
        counts.split += n_long
        # Pieces share a token: the last of one is the first of the next, from which the second is predicted.
        pieces = np.where(long, -(-(lengths - 1) // (most - 1)), 1)
        document = np.repeat(np.arange(len(starts)), pieces)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offsets = nth * (most - 1)
        kept_starts = starts[document] + offsets
        kept_lengths = np.where(long[document], np.minimum(most, lengths[document] - offsets), lengths[document])
        cut = long[document]
        overlap = int(pieces[long].sum()) - n_long
    else:
        keep = ~long if how == "drop" else np.ones(len(long), dtype=np.bool_)
        counts.dropped += n_long if how == "drop" else 0
        counts.truncated += n_long if how == "truncate" else 0
        kept_starts, kept_lengths, cut, overlap = starts[keep], np.minimum(lengths[keep], most), long[keep], 0
    if store.masked and cut.any():
        bits = store.map(TARGETS, "u1")
        empty = np.zeros(len(cut), dtype=np.bool_)
        for i in np.flatnonzero(cut):
            empty[i] = not _unpack(bits, int(kept_starts[i]) + 1, int(kept_starts[i] + kept_lengths[i])).any()
        counts.without_target += int(empty.sum())
        kept_starts, kept_lengths = kept_starts[~empty], kept_lengths[~empty]
    counts.tokens_left_out += before + overlap - int(kept_lengths.sum())
    return kept_starts, kept_lengths


@dataclass
class Writer:
    """Writes a corpus: documents are appended in order, in pieces of any number of documents."""

    directory: Path
    dtype: str
    masked: bool
    n_tokens: int = 0
    n_documents: int = 0
    n_targets: int = 0
    _bits: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))

    def __post_init__(self) -> None:
        names = (TOKENS, BOUNDS, PLACES, *((TARGETS,) if self.masked else ()))
        self._closing = ExitStack()
        self._files = {name: self._closing.enter_context((self.directory / name).open("wb")) for name in names}
        np.zeros(1, dtype="<i8").tofile(self._files[BOUNDS])

    def append(
        self,
        tokens: npt.NDArray[Any],
        lengths: Integers,
        places: npt.NDArray[np.uint64],
        is_target: npt.NDArray[np.bool_] | None = None,
        *,
        ends: bool = True,
    ) -> None:
        """Add `len(lengths)` documents, whose tokens follow one another in `tokens`.

        Args:
            ends: False if the last document goes on in the next call, which then gives its rest first.
        """
        tokens.astype(self.dtype, copy=False).tofile(self._files[TOKENS])
        stops = self.n_tokens + np.cumsum(lengths)
        n_ended = len(lengths) if ends else len(lengths) - 1
        stops[:n_ended].astype("<i8").tofile(self._files[BOUNDS])
        places[:n_ended].astype("<u8").tofile(self._files[PLACES])
        self.n_documents += n_ended
        self.n_tokens += len(tokens)
        if self.masked and is_target is not None:
            self.n_targets += int(is_target.sum())
            bits = np.concatenate([self._bits, is_target])
            n_packed = len(bits) // 8 * 8
            np.packbits(bits[:n_packed], bitorder="little").tofile(self._files[TARGETS])
            self._bits = bits[n_packed:]

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._closing:
            if self.masked:
                np.packbits(self._bits, bitorder="little").tofile(self._files[TARGETS])
            else:
                self.n_targets = self.n_tokens - self.n_documents
