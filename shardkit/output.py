"""A process's own output, when the disk it goes to is full: lines are lost, the process goes on."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

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
