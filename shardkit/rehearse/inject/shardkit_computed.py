"""Readies the emulated GPUs of a program whose numbers are computed, and notes whether it uses them.

`SHARDKIT_COMPUTED` names a folder: each process that initialises CUDA makes a file with its number there.
"""

from __future__ import annotations

import os
from pathlib import Path

import emucuda  # type: ignore[import-not-found]


def begin() -> None:
    emucuda.preload()


def attach() -> None:
    """An entry point of `torch.backends`, called when torch has been imported."""
    folder = os.environ.get("SHARDKIT_COMPUTED")
    if folder:
        import torch

        torch.cuda._lazy_call(lambda: Path(folder, str(os.getpid())).touch())  # type: ignore[no-untyped-call]
