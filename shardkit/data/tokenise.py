"""Text to tokens: a byte a token, each document followed by a zero byte, written as uint16 and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .sources import TextFile, is_text, split_files, unreadable

logger = logging.getLogger(__name__)

SEPARATOR = 0
TEXT_DTYPE = "<u2"
CHUNK = 1 << 24
"""Bytes or tokens handled at a time."""


def tail_size(n: int, fraction: float) -> int:
    """Size of the held-out tail: at least one of n, never all."""
    return min(max(round(n * fraction), 1), n - 1) if n > 1 else 0


def tokenise(
    directory: Path, source: str, files: list[TextFile], val_files: list[TextFile] | None, val_fraction: float
) -> dict[str, Any]:
    """Write `train.bin` and `val.bin`; returns their metadata."""
    candidates = len(files) + len(val_files or [])
    logger.info("tokenising %s: %d files, %.3f GiB", source, candidates, sum(f.size for f in files) / 2**30)
    train = [file for file in files if is_text(file)]
    val = [file for file in val_files if is_text(file)] if val_files is not None else []
    for kept, what in ((train, source), *(((val, "data.val_path"),) if val_files is not None else ())):
        if not kept:
            raise DataError(f"{what} holds binary files only", "point it at text, or at one .bin file of tokens")
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
    """Append the byte ranges as tokens, each followed by the separator; returns what was counted."""
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
    try:
        with open(file.path, "rb") as stream:
            stream.seek(start)
            while start < stop and (data := stream.read(min(CHUNK, stop - start))):
                start += len(data)
                yield np.frombuffer(data, dtype=np.uint8)
    except OSError as error:
        raise unreadable(file.path, error) from error
