"""Writing so that a full or failing disk ends no run, and so that what is written stays readable."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError

STORAGE_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}
"""What a full or failing disk says."""


class _Lossy(io.FileIO):
    """A file that takes everything, and keeps what there is room for."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in STORAGE_TROUBLE:
                raise
            return memoryview(data).nbytes


def outlive_full_disks() -> None:
    """Let `print` and logging to stdout and stderr survive a disk that fills up; for a process's entry.

    Launchers redirect both to files in the run directory. Without this a line that does not fit raises in the training
    loop, and once more when the interpreter ends. Streams that are no files are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.flush()
            kept = io.BufferedWriter(_Lossy(stream.fileno(), "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(kept, stream.encoding, stream.errors, line_buffering=True))


_LOG = logging.getLogger(__name__)
_warned: set[str] = set()


def append_jsonl(path: str | Path, *objects: Mapping[str, Any]) -> bool:
    """Append one line per object, each in one write; whether all were written.

    A full or failing disk (ENOSPC, EDQUOT, EFBIG, EIO, ESTALE) does not end a run that only wanted to note something:
    it is warned about once per file, and a line that was cut short is taken back.

    Raises:
        ConfigError: the file cannot be opened for writing for another reason.
        ValueError: a number that is not finite: JSON has none.
    """
    lines = [json.dumps(obj, allow_nan=False).encode() + b"\n" for obj in objects]
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            for line in lines:
                _write_whole(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in STORAGE_TROUBLE:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}", "choose a run.dir that exists and is writable"
            ) from error
        if str(path) not in _warned:
            _warned.add(str(path))
            _LOG.warning("cannot write %s: %s; the run goes on without these lines", path, error.strerror)
        return False
    return True


def _write_whole(descriptor: int, line: bytes) -> None:
    size = os.fstat(descriptor).st_size
    written = os.write(descriptor, line)
    if written == len(line):
        return
    try:  # the disk filled up in the middle: the rest fails, and says why
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        os.ftruncate(descriptor, size)
        raise
