"""A tokenised corpus with the bounds of its documents, memory-mapped, and the cache that it is kept in.

A corpus is a directory: `tokens.bin` (uint16 or uint32, little endian), `bounds.bin` (int64 [n + 1]: document i is
tokens[bounds[i] : bounds[i + 1]]), `places.bin` (uint64 [n]: a hash of each document's text, which decides its split),
`targets.bin` (one bit a token, little bit order; absent if every token is to be predicted), and `meta.json`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .. import files
from ..errors import DataError
from ..files import group_of_new_files, locked, mode_like
from .rows import TextFile

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
FORMAT_VERSION = 1
TOKENS, BOUNDS, PLACES, TARGETS = "tokens.bin", "bounds.bin", "places.bin", "targets.bin"
Split = Literal["train", "val"]
LongSamples = Literal["truncate", "split", "drop"]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Store:
    """One tokenised source on disk."""

    directory: str
    source: str  # its name
    dtype: str  # of the tokens, `<u2` or `<u4`
    masked: bool  # only some tokens are to be predicted, and `targets.bin` says which
    kind: str = "text"  # the columns that its rows had: text, messages or prompt

    def map(self, name: str, dtype: str) -> npt.NDArray[Any]:
        path = Path(self.directory) / name
        return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


@dataclass(frozen=True)
class Choice:
    """Which documents of a corpus are wanted, and what happens to those longer than `max_tokens`.

    truncate keeps a document's start; split cuts it into pieces that share one token, so that each token but the first
    is predicted once; drop leaves it out. A piece without any token to predict is left out too.
    """

    split: Split | None = None  # None = all documents
    val_fraction: float = 0.0  # share of the documents, by the hash of their text, that are validation data
    max_tokens: int | None = None  # None = documents stay whole
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
    the tokens before it; token 0 never counts. Of each document, `lengths` has its tokens (int32), and `source_of` the
    index of its source in `sources` (uint8). `long` counts what became of documents that were too long.
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


def tail_size(n: int, fraction: float) -> int:
    """Size of the held-out tail: at least one of n, never all; nothing if `fraction` is 0."""
    if not fraction:
        return 0
    return min(max(round(n * fraction), 1), n - 1) if n > 1 else 0


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

        With `ends` false the last document goes on in the next call, which then gives its rest first.
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


# The cache, which several processes may fill at the same time.

META = "meta.json"
_TEMPORARY = ".building-"
_ABANDONED_AFTER_S = 24 * 3600.0
_FIX = "set data.cache_dir to a directory that can be written and has room"


def cached_entry(
    cache_dir: str | None, key: str, build: Callable[[Path], dict[str, Any]], sources: Iterable[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """The entry `key`, built once: `build` fills an empty directory and returns the metadata kept beside its files.

    An entry is rebuilt if the size of one of its files differs from its metadata. Other users may read an entry as far
    as the umask allows, if they may read all of `sources`. Returns the entry's directory and its metadata.
    """
    try:
        root = Path(cache_dir).expanduser() if cache_dir else files.cache_dir()
    except RuntimeError as error:
        raise DataError("this user has no home directory to keep the token cache in", _FIX) from error
    entry = root / key
    meta = read_meta(entry)
    if meta is not None:
        return entry, meta
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{key}.lock", optional=True):
            meta = read_meta(entry)
            if meta is None:
                for path in root.glob(f"{_TEMPORARY}*"):  # left by processes that were killed while building
                    with suppress(FileNotFoundError):  # another process removes it too, or has just finished with it
                        if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                            shutil.rmtree(path, ignore_errors=True)
                meta = build_entry(entry, build, mode_like(map(Path, sources), group_of_new_files(root)))
    except OSError as error:
        raise DataError(f"cache directory {root} cannot be used: {error.strerror or error}", _FIX) from error
    return entry, meta


def cache_key(values: list[Any]) -> str:
    """A hash of plain values, and of the path, size and modification time of each file among them."""

    def listed(file: TextFile) -> list[Any]:
        return [os.path.abspath(file.path), file.name, file.size, file.mtime_ns]

    text = json.dumps(values, sort_keys=True, default=listed)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def build_entry(entry: Path, build: Callable[[Path], dict[str, Any]], mode: int = 0o777) -> dict[str, Any]:
    """Make the folder `entry`, whole or not at all: `build` fills an empty one beside it and returns its metadata."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = entry.parent / f"{_TEMPORARY}{os.urandom(6).hex()}"
    temporary.mkdir(mode=mode)
    try:
        meta = build(temporary)
        meta["files"] = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / META).write_text(json.dumps(meta, indent=1) + "\n")
        return _rename_into_place(temporary, entry, meta)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_into_place(temporary: Path, entry: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Make `temporary` the entry; if another process was first, use its entry if it is complete, else replace it."""
    for _ in range(10):
        try:
            temporary.rename(entry)
            return meta
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        existing = read_meta(entry)
        if existing is not None:
            return existing
        _LOG.warning("%s is damaged and is built again", entry)
        damaged = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=entry.parent))
        try:
            with suppress(FileNotFoundError):  # another process has moved it away just now: try again to take its place
                entry.rename(damaged / entry.name)
        finally:
            shutil.rmtree(damaged, ignore_errors=True)
    raise OSError(errno.EBUSY, f"other processes keep rewriting {entry}")


def read_meta(entry: Path) -> dict[str, Any] | None:
    """Metadata of a complete entry; None if the entry is absent or damaged."""
    try:
        meta: dict[str, Any] = json.loads((entry / META).read_text())
        is_complete = all((entry / name).stat().st_size == size for name, size in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if is_complete else None
