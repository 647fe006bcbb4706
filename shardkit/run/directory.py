"""The run directory: who may write there, and what is known about the run before its first step."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..config.load import LoadedConfig
from ..errors import ConfigError, ShardkitError, gib
from ..files import write_whole
from ..parallel.world import World

MARKER = "config.yaml"
FILES = ("config.yaml", "metrics.jsonl", "memory.jsonl", "env.json", "report.html", "compare.html")
FOLDERS = ("tensorboard", "wandb", "logs", "checkpoints", "profile", "trace", "oom", ".rendezvous")


def prepare(loaded: LoadedConfig, world: World) -> Path:
    """Claim `run.dir` for this run; collective, so that every rank stops when rank 0 may not write.

    Raises:
        ConfigError: the directory holds a run already, or cannot be written.
    """
    path = Path(loaded.config.run.dir)
    on_main(world, path, lambda: _claim(path, loaded))
    return path


def on_main(world: World, path: Path, action: Callable[[], None]) -> None:
    """Do something that writes to the directory on rank 0; what goes wrong there is raised on every rank."""
    problem: ShardkitError | None = None
    if world.is_main:
        try:
            action()
        except ShardkitError as error:
            problem = error
        except OSError as error:
            cause = f"run.dir={path} cannot be written: {error.strerror}"
            problem = ConfigError(cause, "set run.dir to a directory you can write")
    for found in world.gather(problem):
        if isinstance(found, ShardkitError):
            raise found


def _claim(path: Path, loaded: LoadedConfig) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.dir={path} is a file", "set run.dir to a directory")
    if (path / MARKER).exists() or (path / "metrics.jsonl").exists():
        if loaded.config.run.overwrite:
            _clear(path)
        elif not _resumes(path, loaded.config.run.resume):
            raise ConfigError(
                f"run.dir={path} already holds a run",
                "set run.resume=true to go on with it, run.overwrite=true to delete it, or another run.dir",
            )
    path.mkdir(parents=True, exist_ok=True)
    for folder in ("logs", "checkpoints"):
        (path / folder).mkdir(exist_ok=True)
    if loaded.config.run.resume is False:  # a resume writes them once it has found what to go on from
        _write_settings(path, loaded)


def _resumes(path: Path, resume: bool | str) -> bool:
    """Whether `run.resume` asks for the run that `path` holds."""
    if isinstance(resume, bool):
        return resume
    return Path(resume).resolve().is_relative_to(path.resolve())


def _write_settings(path: Path, loaded: LoadedConfig) -> None:
    (path / "config.yaml").write_text(loaded.render())
    (path / "env.json").write_text(json.dumps(environment(), indent=1) + "\n")


def _keep_settings(path: Path) -> None:
    """Move the settings of the run so far to `logs/`, numbered: those of the resumed run take their place."""
    (path / "logs").mkdir(exist_ok=True)
    number = len(list((path / "logs").glob("config.*.yaml"))) + 1
    for name, kept in (("config.yaml", f"config.{number}.yaml"), ("env.json", f"env.{number}.json")):
        if (path / name).exists():
            (path / name).replace(path / "logs" / kept)


def go_on(loaded: LoadedConfig, world: World, path: Path, step: int) -> None:
    """Make the directory that of a run resumed after `step`: its settings, and each step recorded once; collective.

    Raises:
        ConfigError: it cannot be written.
    """

    def change() -> None:
        _keep_settings(path)
        _write_settings(path, loaded)
        _rewind(path, step)

    on_main(world, path, change)


def _rewind(path: Path, step: int) -> None:
    """Drop what was recorded after `step`, and a last line that was cut short."""
    for name in ("metrics.jsonl", "memory.jsonl"):
        file = path / name
        if not file.exists():
            continue
        lines = file.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
        if kept != lines:
            write_whole(file, "".join(kept))
    if step == 0 and (path / "tensorboard").exists():  # otherwise its reader is told what to forget
        shutil.rmtree(path / "tensorboard")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _clear(path: Path) -> None:
    """Delete what a run wrote there, and nothing else."""
    for name in FILES:
        (path / name).unlink(missing_ok=True)
    for name in FOLDERS:
        folder = path / name
        if not folder.exists():
            continue
        if name in ("logs", ".rendezvous"):
            _clear_but_in_use(folder)
        else:
            shutil.rmtree(folder)


def _clear_but_in_use(folder: Path) -> None:
    """Delete a folder's entries, except what this job's launcher is writing to (SHARDKIT_KEEP, absolute paths)."""
    kept = [Path(entry).resolve() for entry in os.environ.get("SHARDKIT_KEEP", "").split(os.pathsep) if entry]
    for entry in folder.iterdir():
        resolved = entry.resolve()
        if any(path == resolved or path.is_relative_to(resolved) for path in kept):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def listed(path: Path) -> str:
    """The run's files on one line: those at its top, and each folder with how many it holds and how large they are."""
    parts = []
    for entry in sorted(path.iterdir()):
        inside = [p.stat().st_size for p in entry.rglob("*") if p.is_file()] if entry.is_dir() else []
        parts += [f"{entry.name}/ ({len(inside)}, {gib(sum(inside))})"] if inside else []
        parts += [entry.name] if entry.is_file() else []
    return f"{path}: {', '.join(parts)}"


def environment() -> dict[str, Any]:
    """Versions, hardware, command line and commit: what another person needs to repeat the run."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: _version(name) for name in ("shardkit", "torch", "deepspeed", "accelerate", "numpy", "pydantic")
        },
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": _cpus(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _cpus() -> int:
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str | None:
    """Output of a git command in the working directory; `None` where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
