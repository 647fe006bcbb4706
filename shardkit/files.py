"""Append to a file of JSON lines so that it stays readable whatever happens to the disk."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .output import STORAGE_TROUBLE

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
