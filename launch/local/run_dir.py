"""Tells a run directory from a folder of other things, before anything is written there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ...errors import ConfigError

MARK = ".shardkit"
"""The folder that marks a run directory as shardkit's."""
_LAUNCHERS = re.compile(r"\..*|logs|checkpoints|submit|plan\.json|array_\d+|lost\+found|.*\.(log|out|err)")
"""Entries that a directory may have before its run begins: launchers and shells write some, and `checkpoints` may be a
link to another disk."""
_MODEL = re.compile(r"config\.json|tokenizer.*\.json|.*\.(safetensors|gguf)|pytorch_model.*")


def has_run(path: Path) -> bool:
    """Whether the directory holds a run: records of steps, or checkpoints. A start that failed before is none."""
    try:
        if (path / "metrics.jsonl").stat().st_size > 0:
            return True
    except OSError:
        pass
    return any((path / "checkpoints").glob("step_*"))


def refuse_blocked(path: Path) -> None:
    """Check that no file lies where the directory, or a folder above it, has to be."""
    for folder in (path, *path.parents):
        if folder.exists():
            if not folder.is_dir():
                below = "" if folder == path else f" lies below {folder}, which"
                raise ConfigError(f"run.dir={path}{below} is a file", "set run.dir to a directory")
            return


def refuse_without_run(path: Path, resume: bool | str, environ: Mapping[str, str] = os.environ) -> None:
    """Check that a run may begin in a directory that holds none. `run.resume=true` is right at the first start of a
    scheduler's job, which has the same command at every start."""
    refuse_blocked(path)
    entries = foreign_entries(path)
    if entries:
        model_file = next((name for name in entries if _MODEL.fullmatch(name)), None)
        kind = "holds no run and is not empty" if model_file is None else "is a model folder"
        raise ConfigError(
            f"run.dir={path} {kind} ({model_file or entries[0]}{', …' * (len(entries) > 1)}): nothing is written there",
            "set run.dir to a new or an empty directory",
        )
    if resume is not True:
        return
    from . import restart  # not for every `plan` and start: it imports what the launcher needs

    if restart.this_start(environ).job is None and restart.wrote(path, environ) is not True:
        state = "holds no run: no step was recorded there" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"run.resume=true, but run.dir={path} {state}",
            "correct run.dir, or set run.resume=auto: it continues a run if there is one, and starts one otherwise",
        )


def foreign_entries(path: Path) -> list[str]:
    """The entries of a directory that neither a run nor a launcher made; none in a directory with a run's mark."""
    if (path / MARK).is_dir() or not path.is_dir():
        return []
    names = [name for name in sorted(os.listdir(path)) if not _LAUNCHERS.fullmatch(name)]
    checkpoints = path / "checkpoints"
    if checkpoints.is_dir() and not checkpoints.is_symlink():
        names += [f"checkpoints/{name}" for name in sorted(os.listdir(checkpoints)) if not name.startswith(".")]
    return names
