"""A directory of finished entries that several processes, on one or several nodes, may build at the same time.

An entry is a directory made elsewhere and renamed into place, so that it is there whole or not at all. A file lock lets
one process of a node build while its peers wait; where the file system has no locks, several build and one rename wins.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import DataError

logger = logging.getLogger(__name__)

META = "meta.json"
_TEMPORARY = ".building-"
_ABANDONED_AFTER_S = 24 * 3600.0
_FIX = "set data.cache_dir to a directory that can be written and has room"


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/shardkit, or ~/.cache/shardkit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardkit"


def cached_entry(
    cache_dir: str | None, key: str, build: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """The entry `key`, built once: `build` fills an empty directory and returns the metadata kept beside its files.

    An entry whose files have not the sizes written down in its metadata is built again.

    Returns:
        The entry's directory and its metadata.

    Raises:
        DataError: the cache directory cannot be written, or is full.
    """
    try:
        root = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    except RuntimeError as error:
        raise DataError("this user has no home directory to keep the token cache in", _FIX) from error
    entry = root / key
    meta = _read_meta(entry)
    if meta is not None:
        return entry, meta
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{key}.lock"):
            meta = _read_meta(entry)
            if meta is None:
                _remove_abandoned(root)
                meta = _build(root, entry, build)
    except OSError as error:
        raise DataError(f"cache directory {root} cannot be used: {error.strerror or error}", _FIX) from error
    return entry, meta


def _build(root: Path, entry: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=root))
    try:
        meta = build(temporary)
        meta["files"] = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / META).write_text(json.dumps(meta, indent=1) + "\n")
        # Ranks may run as other users of the same cache; mkdtemp made the directory private.
        temporary.chmod(0o755)
        return _rename_into_place(temporary, entry, meta)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_into_place(temporary: Path, entry: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Make `temporary` the entry; where another process was first, take its entry if it is whole, else replace it."""
    for _ in range(10):
        try:
            temporary.rename(entry)
            return meta
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        existing = _read_meta(entry)
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
    raise OSError(errno.EBUSY, f"{entry} is rewritten by other processes all the time")


def _read_meta(entry: Path) -> dict[str, Any] | None:
    """Metadata of a whole entry; None when it is absent or damaged."""
    try:
        meta: dict[str, Any] = json.loads((entry / META).read_text())
        whole = all((entry / name).stat().st_size == size for name, size in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if whole else None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, released by the kernel if the process dies; nothing where locks are not supported."""
    with open(path, "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("no lock on %s (%s): processes may build the same entry", path, error)
        yield


def _remove_abandoned(root: Path) -> None:
    """Remove what processes killed while building have left, a day later."""
    for path in root.glob(f"{_TEMPORARY}*"):
        with suppress(FileNotFoundError):  # another process removes it too, or has just finished with it
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
