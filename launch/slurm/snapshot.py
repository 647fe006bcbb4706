"""What a submitted job will run, kept in RUN_DIR/submit: its config, its script, and which code it is."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ... import __version__
from ...errors import LaunchError

FOLDER = "submit"


def write(run_dir: Path, config: str, script: str) -> list[Path]:
    """Write the snapshot; an earlier one is moved to `submit.N`. Returns the files.

    Files: config.yaml (resolved), job.sbatch (can be submitted again), code.json (versions, commit), code.patch (what
    differs from that commit, if anything).

    Raises:
        LaunchError: the run directory cannot be written.
    """
    folder = run_dir / FOLDER
    files = {"config.yaml": config, "job.sbatch": script, "code.json": json.dumps(code_version(), indent=1) + "\n"}
    patch = _git("diff", "HEAD", "--binary")
    if patch:
        files["code.patch"] = patch + "\n"
    try:
        if folder.exists():
            folder.rename(_unused(run_dir))
        folder.mkdir(parents=True)
        (run_dir / "logs").mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise LaunchError(
            f"cannot write {folder}: {error.strerror}", "set run.dir to a directory that you can write"
        ) from error
    return [folder / name for name in files]


def remove(run_dir: Path) -> None:
    """Take back a snapshot whose job was refused, and the directories if nothing else is in them."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
    with contextlib.suppress(OSError):  # holds something else
        (run_dir / "logs").rmdir()
        run_dir.rmdir()


def code_version() -> dict[str, object]:
    """Versions, commit of the working directory and of shardkit, and how this was submitted."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "host": platform.node(),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "shardkit_version": __version__,
        "shardkit_commit": _git("rev-parse", "HEAD", cwd=Path(__file__).resolve().parent),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


def _unused(run_dir: Path) -> Path:
    number = 1
    while (run_dir / f"{FOLDER}.{number}").exists():
        number += 1
    return run_dir / f"{FOLDER}.{number}"


def _git(*args: str, cwd: Path | None = None) -> str | None:
    """Output of a git command; None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *args], cwd=cwd, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
