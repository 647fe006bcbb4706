"""File systems of a size, for what happens when a disk is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, lazily: bool = False) -> Iterator[Path]:
    """The folder, made where it is missing, as a file system of 4 MiB; skips a test whose user may not mount one.

    Args:
        lazily: files may still be open there at the end; else that is an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a file system that this user can mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", *(["--lazy"] if lazily else []), str(folder)], check=True)
