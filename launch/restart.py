"""A job that a launcher started again goes on where it stopped, whatever its command line says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .placement import integer


def is_restart(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun restarted these ranks, or Slurm requeued their job."""
    environ = os.environ if environ is None else environ
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(integer(environ, name) > 0 for name in names if name in environ)


def overrides(run_dir: str, resume: bool | str) -> list[str]:
    """What a restarted run sets: to go on in its own directory, never to delete it.

    A run that was to start from another run's checkpoint, and has none of its own yet, starts from there again.
    """
    has_own = any((Path(run_dir) / "checkpoints").glob("step*"))
    if isinstance(resume, str) and not has_own:
        return ["run.overwrite=true"]
    return ["run.overwrite=false", "run.resume=true"]
