"""A corpus: training and validation tokens as memory-mapped arrays, with the counts that give a baseline.

Text is tokenised once, one token per byte and a zero byte after each document, into uint16 files in the cache
directory; a `.bin` file of tokens is mapped in place and only its counts are cached.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..config.libraries import is_first_rank
from ..config.schema import DataConfig
from ..errors import DataError, listed, printable
from .rows import TextFile, find_text_files, is_text, reading, split_files
from .store import cache_key, cached_entry, tail_size

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Counts = npt.NDArray[np.int64]

FORMAT_VERSION = 1
SEPARATOR = 0
TEXT_DTYPE = "<u2"
CHUNK = 1 << 24
"""Bytes or tokens handled at a time."""
_BIN_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_MAX_VOCAB = 1 << 24
_STRETCHES, _STRETCH = 64, 512


@dataclass(frozen=True)
class TokenSpan:
    """A range of tokens in a file; `open` maps it. Cheap to send to another process."""

    path: str
    dtype: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def open(self) -> Tokens:
        if not len(self):
            return np.empty(0, dtype=self.dtype)
        offset = self.start * np.dtype(self.dtype).itemsize
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=offset, shape=(len(self),))

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens, mapped once."""
        return self.open()

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map is a copy of the file: workers map it themselves.
        return {name: part for name, part in vars(self).items() if name != "tokens"}


@dataclass(frozen=True)
class Corpus:
    """Tokens of both splits and how often each occurs: `train_counts[t]` is the number of tokens t."""

    source: str
    train_span: TokenSpan
    val_span: TokenSpan
    train_counts: Counts = field(repr=False)
    val_counts: Counts = field(repr=False)
    n_train_files: int = 1
    n_val_files: int = 1
    n_skipped_files: int = 0

    def span(self, split: Literal["train", "val"]) -> TokenSpan:
        return self.train_span if split == "train" else self.val_span

    @property
    def train(self) -> Tokens:
        return self.train_span.open()

    @property
    def val(self) -> Tokens:
        return self.val_span.open()

    @property
    def max_token(self) -> int:
        """The largest token of either split."""
        return int(np.flatnonzero(self._counts)[-1])

    def occurs(self, token: int) -> bool:
        """Whether a token is in either split."""
        return token < len(self._counts) and bool(self._counts[token])

    @cached_property
    def digest(self) -> str:
        """Digest of how often each token occurs, and of stretches spread over the training tokens."""
        tokens = self.train
        digest = hashlib.blake2b(self._counts.astype("<i8").tobytes(), digest_size=16)
        for start in range(0, len(tokens), max(1, len(tokens) // _STRETCHES)):
            digest.update(tokens[start : start + _STRETCH].astype("<u4").tobytes())
        return digest.hexdigest()

    def unigram_cross_entropy(self) -> float:
        return unigram_cross_entropy(self.train_counts, self.val_counts)

    def describe(self) -> str:
        """One line: the source and its sizes."""
        files = f"{self.n_train_files} + {self.n_val_files} files" if self.n_train_files + self.n_val_files > 2 else ""
        skipped = f"{self.n_skipped_files} binary files skipped" if self.n_skipped_files else ""
        sizes = f"{len(self.train_span):,} training and {len(self.val_span):,} validation tokens"
        return f"{self.source}: " + ", ".join(part for part in (sizes, files, skipped) if part)

    @cached_property
    def _counts(self) -> Counts:
        """How often each token occurs in both splits."""
        counts: Counts = _padded(self.train_counts, self.val_counts).sum(axis=0)
        return counts


def _padded(*counts: Counts) -> Counts:
    size = max(1, *map(len, counts))
    return np.stack([np.pad(c, (0, size - len(c))) for c in counts])


def unigram_cross_entropy(train_counts: Counts, val_counts: Counts) -> float:
    """Validation cross-entropy, nats per token, of the training unigrams: the loss without any context.

    p(t) = (count(t) + 1) / (n + V), add-one smoothed over the V tokens that occur in either split. NaN without
    validation tokens.
    """
    train, val = _padded(train_counts, val_counts)
    seen = (train + val) > 0
    log_p = np.log(train[seen] + 1.0) - np.log(float(train.sum() + seen.sum()))
    n_val = int(val.sum())
    return float(-(val[seen] * log_p).sum() / n_val) if n_val else float("nan")


def open_corpus(data: DataConfig) -> Corpus:
    """Find, tokenise (the first time) and map the corpus that the config describes."""
    if data.path is not None and data.path.endswith(".bin"):
        return _open_bin(data, data.path)
    if data.val_path is not None and data.val_path.endswith(".bin"):
        raise DataError(
            f"data.val_path={data.val_path} is a token file, but data.path={data.path} is text",
            "give both as text or both as .bin",
        )
    return _open_text(data)


def _open_text(data: DataConfig) -> Corpus:
    files = find_text_files(data.path)
    val_files = None
    if data.val_path is not None:
        val_files = find_text_files(data.val_path, "validation") or find_text_files(data.val_path)
    if val_files is None and data.path is not None and data.val_fraction:
        val_files = find_text_files(data.path, "validation") or None

    def build(directory: Path) -> dict[str, Any]:
        return tokenise(directory, _named(data), files, val_files, data.val_fraction)

    settings = {"kind": "text", "val_fraction": None if val_files else data.val_fraction}
    every = [*files, *(val_files or [])]
    key = cache_key([FORMAT_VERSION, settings, len(files), every])
    entry, meta = cached_entry(data.cache_dir, f"text-{key}", build, [file.path for file in every])
    if data.path is not None and is_first_rank():
        n_binary = f"; ignored: {meta['n_skipped']} binary files" if meta["n_skipped"] else ""
        n_files = len(every) - meta["n_skipped"]
        names = listed([file.name for file in every])
        print(printable(f"{data.path}: {n_files} files of text, a token a byte ({names}){n_binary}"), flush=True)
    spans = {s: TokenSpan(str(entry / f"{s}.bin"), TEXT_DTYPE, 0, meta[s]["tokens"]) for s in ("train", "val")}
    return _corpus(_named(data), spans["train"], spans["val"], meta)


def tokenise(
    directory: Path, source: str, files: list[TextFile], val_files: list[TextFile] | None, val_fraction: float
) -> dict[str, Any]:
    """Write `train.bin` and `val.bin`; returns their metadata."""
    candidates = len(files) + len(val_files or [])
    logger.info("tokenising %s: %d files, %.3f GiB", source, candidates, sum(f.size for f in files) / 2**30)
    train = [file for file in files if is_text(file)]
    val = [file for file in val_files if is_text(file)] if val_files is not None else []
    for text_files, name in ((train, source), *(((val, "data.val_path"),) if val_files is not None else ())):
        if not text_files:
            raise DataError(f"{name} holds binary files only", "point it at text, or at one .bin file of tokens")
    meta: dict[str, Any] = {"n_skipped": candidates - len(train) - len(val)}
    if val_files is None and len(train) == 1:
        split = train[0].size - tail_size(train[0].size, val_fraction)
        meta["train"] = _write(directory / "train.bin", [(train[0], 0, split)])
        meta["val"] = _write(directory / "val.bin", [(train[0], split, train[0].size)])
        return meta
    if val_files is None:
        train, val = split_files(train, val_fraction)
    meta["train"] = _write(directory / "train.bin", [(file, 0, file.size) for file in train])
    meta["val"] = _write(directory / "val.bin", [(file, 0, file.size) for file in val])
    return meta


def _write(path: Path, documents: list[tuple[TextFile, int, int]]) -> dict[str, Any]:
    """Append the byte ranges as tokens, each followed by the separator; returns the counts."""
    counts = np.zeros(256, dtype=np.int64)
    with open(path, "wb") as stream:
        for document in documents:
            for data in _read(*document):
                counts += np.bincount(data, minlength=256)
                data.astype(TEXT_DTYPE).tofile(stream)
            counts[SEPARATOR] += 1
            np.array([SEPARATOR], dtype=TEXT_DTYPE).tofile(stream)
    return {"tokens": int(counts.sum()), "counts": counts.tolist(), "n_files": len(documents)}


def _read(file: TextFile, start: int, stop: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Bytes [start, stop) in chunks."""
    with reading(file.path), open(file.path, "rb") as stream:
        stream.seek(start)
        while start < stop and (data := stream.read(min(CHUNK, stop - start))):
            start += len(data)
            yield np.frombuffer(data, dtype=np.uint8)


def _open_bin(data: DataConfig, path: str) -> Corpus:
    dtype = _BIN_DTYPES[data.bin_dtype]
    file, n_tokens = _bin_file(path, data.bin_dtype)
    if data.val_path is not None:
        if not data.val_path.endswith(".bin"):
            raise DataError(
                f"data.val_path={data.val_path} is text, but data.path={path} is a token file",
                "give both as text or both as .bin",
            )
        val_file, n_val = _bin_file(data.val_path, data.bin_dtype)
        spans = TokenSpan(file.path, dtype, 0, n_tokens), TokenSpan(val_file.path, dtype, 0, n_val)
    else:
        val_file, n_val = file, tail_size(n_tokens, data.val_fraction)
        split = n_tokens - n_val
        spans = TokenSpan(file.path, dtype, 0, split), TokenSpan(file.path, dtype, split, n_tokens)

    def build(_: Path) -> dict[str, Any]:
        logger.info("counting the tokens of %s", path)
        return {
            split: {"tokens": len(span), "counts": _count(span).tolist(), "n_files": 1}
            for split, span in zip(("train", "val"), spans, strict=True)
        }

    settings = {"kind": "bin", "dtype": dtype, "spans": [[span.start, span.stop] for span in spans]}
    key = cache_key([FORMAT_VERSION, settings, 1, [file, val_file]])
    _, meta = cached_entry(data.cache_dir, f"counts-{key}", build, [file.path, val_file.path])
    return _corpus(path, *spans, meta)


def _corpus(source: str, train: TokenSpan, val: TokenSpan, meta: dict[str, Any]) -> Corpus:
    counts = {split: np.asarray(meta[split]["counts"], dtype=np.int64) for split in ("train", "val")}
    return Corpus(
        source=source,
        train_span=train,
        val_span=val,
        train_counts=counts["train"],
        val_counts=counts["val"],
        n_train_files=meta["train"]["n_files"],
        n_val_files=meta["val"]["n_files"],
        n_skipped_files=meta.get("n_skipped", 0),
    )


def _named(data: DataConfig) -> str:
    return data.path if data.path is not None else "Python's standard library"


def _bin_file(path: str, bin_dtype: str) -> tuple[TextFile, int]:
    """The file and its number of tokens."""
    expanded = os.path.expanduser(path)
    if not os.path.isfile(expanded):
        raise DataError(f"token file {path} does not exist", "set data.path (data.val_path) to an existing .bin file")
    status = os.stat(expanded)
    width = np.dtype(_BIN_DTYPES[bin_dtype]).itemsize
    if status.st_size == 0:
        raise DataError(f"token file {path} is empty", "write tokens to it, or set data.path to another file")
    if status.st_size % width:
        raise DataError(
            f"{path} has {status.st_size} bytes, not a multiple of the {width} of data.bin_dtype={bin_dtype}",
            "set data.bin_dtype to the type the file was written with; it must hold tokens only, without a header",
        )
    return TextFile(expanded, os.path.basename(path), status.st_size, status.st_mtime_ns), status.st_size // width


def _count(span: TokenSpan) -> Counts:
    """How often each token occurs, read in chunks."""
    with reading(span.path):
        tokens = span.open()
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        largest = int(chunk.max())
        if largest >= _MAX_VOCAB:
            raise DataError(
                f"token file {span.path} holds the token {largest}, more than any vocabulary has",
                "set data.bin_dtype to the type the file was written with (uint16, perhaps)",
            )
        counts = np.pad(counts, (0, max(0, largest + 1 - len(counts))))
        counts += np.bincount(chunk, minlength=len(counts))
    return counts
