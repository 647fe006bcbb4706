"""Tokens of bytes, and the cache of tokenised data, which several processes may fill at the same time."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import files
from ...errors import DataError
from ...files import group_of_new_files, locked, mode_like
from ..listing import TextFile, is_text, split_files, unreadable

logger = logging.getLogger(__name__)

META = "meta.json"
_TEMPORARY = ".building-"
_ABANDONED_AFTER_S = 24 * 3600.0
_FIX = "set data.cache_dir to a directory that can be written and has room"


def cached_entry(
    cache_dir: str | None, key: str, build: Callable[[Path], dict[str, Any]], sources: Iterable[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """The entry `key`, built once: `build` fills an empty directory and returns the metadata kept beside its files.

    An entry is rebuilt if the size of one of its files differs from its metadata. Other users may read an entry as far
    as the umask allows, if they may read all of `sources`.

    Returns:
        The entry's directory and its metadata.

    Raises:
        DataError: the cache directory cannot be written, or is full.
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
                _remove_abandoned(root)
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
    """Make the folder `entry`, whole or not at all: `build` fills an empty one beside it and returns its metadata.

    Raises:
        OSError: it cannot be written.
    """
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
        logger.warning("%s is damaged and is built again", entry)
        damaged = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=entry.parent))
        try:
            entry.rename(damaged / entry.name)
        except FileNotFoundError:
            pass  # another process has moved it away just now
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


def _remove_abandoned(root: Path) -> None:
    """Remove directories that killed processes left while building, after a day."""
    for path in root.glob(f"{_TEMPORARY}*"):
        with suppress(FileNotFoundError):  # another process removes it too, or has just finished with it
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


SEPARATOR = 0
TEXT_DTYPE = "<u2"
CHUNK = 1 << 24
"""Bytes or tokens handled at a time."""


def tail_size(n: int, fraction: float) -> int:
    """Size of the held-out tail: at least one of n, never all; nothing if `fraction` is 0."""
    if not fraction:
        return 0
    return min(max(round(n * fraction), 1), n - 1) if n > 1 else 0


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
    try:
        with open(file.path, "rb") as stream:
            stream.seek(start)
            while start < stop and (data := stream.read(min(CHUNK, stop - start))):
                start += len(data)
                yield np.frombuffer(data, dtype=np.uint8)
    except OSError as error:
        raise unreadable(file.path, error) from error
