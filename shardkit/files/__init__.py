"""Write files so that a full or failing disk ends no run and readers never find half a file; lock files."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import math
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from ..errors import ConfigError

STORAGE_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}
"""The error numbers of a full or failing disk."""
TAIL = 1 << 16
"""Bytes at the end of a file of JSON lines that hold its last ones."""
_LOG = logging.getLogger(__name__)
_warned: set[str] = set()


class _Lossy(io.FileIO):
    """A file that accepts every write and drops the bytes that do not fit on the disk. A pipe without a reader raises
    at the first write only: the flush at the interpreter's end would print a traceback."""

    _has_reader = True

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            if self._has_reader:
                self._has_reader = False
                raise
        except OSError as error:
            if error.errno not in STORAGE_TROUBLE:
                raise
        return memoryview(data).nbytes


def outlive_full_disks() -> None:
    """Let `print` and logging survive a full disk and a closed terminal; call it once when a process starts.

    Launchers redirect stdout and stderr to files in the run directory. Without this, a line that does not fit raises in
    the training loop, and again when the interpreter ends. Streams that are not files are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            buffered = io.BufferedWriter(_Lossy(stream.fileno(), "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=True))


def write_whole(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Create or replace a file: a reader, now or after a crash, finds either the old or the new one, complete.

    Its mode is that of a new file. With several writers at once, the last one wins. A killed writer leaves its draft,
    `NAME.part…`, behind. `durable`: sync the content to disk before the rename; for the rename itself, sync the folder.
    """
    data = content.encode() if isinstance(content, str) else content
    # A shared folder has writers on several nodes: a process id would not tell them apart.
    draft = path.with_name(f"{path.name}.part{os.urandom(6).hex()}")
    file = draft.open("xb")
    try:
        with file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the caller must see the first error
            draft.unlink()
        raise


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/shardkit (default ~/.cache/shardkit), shared by this user's jobs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardkit"


@contextmanager
def locked(path: Path, wait_s: float | None = None, optional: bool = False) -> Iterator[IO[str] | None]:
    """Hold an exclusive lock on a file, which is created and kept; it is released when the process ends.

    `wait_s`: seconds to wait for other holders, until BlockingIOError; None: without limit. `optional`: on a file
    system without locks, continue and yield None instead of the file, which is open for reading and appending.
    """
    with path.open("a+") as file:
        lock_file: IO[str] | None = file
        try:
            _lock(file, wait_s)
        except OSError as error:
            if not optional or isinstance(error, BlockingIOError):
                raise
            _LOG.debug("no lock on %s (%s): going on without", path, error)
            lock_file = None
        yield lock_file


def _lock(file: IO[str], wait_s: float | None) -> None:
    if wait_s is None:
        fcntl.flock(file, fcntl.LOCK_EX)
        return
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def mode_like(sources: Iterable[Path], group: int) -> int:
    """The mode of a folder whose files derive from `sources`: open only to those who may read all of these. A source
    that another group than the new folder's may read is closed to this one, unless everybody may read it."""
    mode, folders = 0o777, set[Path]()
    for path in sources:
        mode &= _shared(path.stat(), group, 0o4)
        folders |= set(path.resolve().parents)
    for folder in folders:
        mode &= _shared(folder.stat(), group, 0o1)
    return mode


def _shared(status: os.stat_result, group: int, permission: int) -> int:
    """The mode without the bits of the group and of others, where these lack `permission` (4: read, 1: enter)."""
    others_may = bool(status.st_mode & permission)
    members = bool(status.st_mode & permission << 3) and (others_may or status.st_gid == group)
    return 0o700 | 0o070 * members | 0o007 * others_may


def group_of_new_files(folder: Path) -> int:
    """The id of the group that a file made in `folder` will have."""
    status = folder.stat()
    return status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Open a file for reading without ever waiting, as a pipe would: OSError for all but regular files. `flags`:
    further ones of `os.open`, such as O_NOFOLLOW."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    """The content of a file that another program may have written; OSError if it is not regular, or above a GiB."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > 1 << 30:
            raise OSError(errno.EFBIG, f"larger than {1 << 30:,} bytes", str(path))
        return file.read()


def read_at(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out` with a file's bytes from `offset` on; returns their number, which is less if the file ends before."""
    n_read = 0
    while n_read < len(out) and (count := os.preadv(descriptor, [out[n_read:]], offset + n_read)):
        n_read += count
    return n_read


def append_jsonl(path: str | Path, *objects: Mapping[str, Any]) -> bool:
    """Append one line per object, each in one write; returns whether all were written.

    A full or failing disk (ENOSPC, EDQUOT, EFBIG, EIO, ESTALE) does not end a run that only wanted to log something:
    there is one warning per file, and a partly written line is removed. ValueError if a number is not finite.
    """
    lines = [json.dumps(obj, allow_nan=False).encode() + b"\n" for obj in objects]
    try:
        append_lines(path, lines)
    except OSError as error:
        if error.errno not in STORAGE_TROUBLE:
            fix = "choose a run.dir that exists and is writable"
            raise ConfigError(f"cannot write {path}: {error.strerror}", fix) from error
        if str(path) not in _warned:
            _warned.add(str(path))
            _LOG.warning("cannot write %s: %s; the run goes on without these lines", path, error.strerror)
        return False
    return True


def append_lines(path: str | Path, lines: Iterable[bytes]) -> None:
    """Append lines, each in one write: lines of several processes do not mix, and a partly written one is removed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for line in lines:
            size = os.fstat(descriptor).st_size
            written = os.write(descriptor, line)
            try:
                while written < len(line):  # the disk filled up midway: writing the rest raises the reason
                    written += os.write(descriptor, line[written:])
            except OSError:
                os.ftruncate(descriptor, size)
                raise
    finally:
        os.close(descriptor)


def extend_last_line(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Add fields to the last object of a file of JSON lines, in one write: a reader finds the old line or the new one.

    A file that is missing or ends in no such line is left alone; so is one on a full or failing disk, with a warning.
    """
    addition = b", " + json.dumps(fields, allow_nan=False).encode()[1:] + b"\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "make the run directory writable") from error
    try:
        size = os.fstat(descriptor).st_size
        if size < 3 or os.pread(descriptor, 2, size - 2) != b"}\n":
            return
        try:
            if os.pwrite(descriptor, addition, size - 2) == len(addition):
                return
        except OSError as error:
            if error.errno not in STORAGE_TROUBLE:
                raise
        os.pwrite(descriptor, b"}\n", size - 2)  # these two bytes have their place already
        os.ftruncate(descriptor, size)
        _LOG.warning("cannot write %s: the disk is full or fails; its last line lacks %s", path, ", ".join(fields))
    finally:
        os.close(descriptor)


def read_objects(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The objects on a file's lines; damaged lines are skipped, and a file that cannot be read has none. `last_bytes`:
    read only the complete lines among this many bytes at the end."""
    try:
        with open_regular(path) as file:
            start = 0 if last_bytes is None else max(0, file.seek(0, os.SEEK_END) - last_bytes)
            file.seek(start)
            lines = file.read().splitlines()
    except OSError:
        return []
    return [content for line in lines[1 if start else 0 :] if (content := parsed(line))]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file cannot be read or holds anything else."""
    try:
        return parsed(read_regular(path))
    except OSError:
        return {}


def parsed(line: str | bytes) -> dict[str, Any]:
    """The object on a line; empty for one that a kill cut short."""
    try:
        content = parse_json(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that another program may have written; impossible numbers, such as 1e999 and NaN, become None."""

    def finite(digits: str) -> float | None:
        number = float(digits)
        return number if math.isfinite(number) else None

    try:
        return json.loads(
            text, parse_int=lambda digits: int(digits) if len(digits) < 19 else None, parse_float=finite,
            parse_constant=lambda _: None,
        )  # fmt: skip
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
