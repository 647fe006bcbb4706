"""GPUs of this node, without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import LaunchError


def visible_gpus(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> int:
    """GPUs that a process started here would see: CUDA_VISIBLE_DEVICES, else the driver's devices."""
    environ = os.environ if environ is None else environ
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    present = len([path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    if listed is None:
        return present
    return min(present, len([entry for entry in listed.split(",") if entry.strip() not in ("", "-1")]))


def ranks_per_node(asked: str, device: str, environ: Mapping[str, str] | None = None) -> int:
    """`auto` → one rank per visible GPU; a number as it is.

    Raises:
        LaunchError: no number, or `auto` on a machine without GPUs or for a run on the CPU.
    """
    if re.fullmatch(r"[0-9]{1,5}", asked) and int(asked) > 0:
        return int(asked)
    if asked != "auto":
        raise LaunchError(f"--nproc-per-node {asked!r} is no number of ranks", "pass a number from 1, or auto")
    count = 0 if device == "cpu" else visible_gpus(environ)
    if count == 0:
        what = "run.device=cpu" if device == "cpu" else "this machine has no GPU"
        raise LaunchError(f"--nproc-per-node auto means one rank per GPU, but {what}", "pass --nproc-per-node N")
    return count
