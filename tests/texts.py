"""Files that tests write: a text to train on, trees of files, programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.ranks import REPO


def write_numbers(folder: Path, files: int = 20) -> Path:
    """A folder of small files, each with a line of its own again and again."""
    return write_files(folder, {f"{i}.txt": f"number {i} comes before number {i + 1}\n" * 30 for i in range(files)})


def write_words(folder: Path) -> None:
    words = ("alpha", "beta", "gamma", "delta", "epsilon")
    write_files(folder, {"text.txt": " ".join(words[(i * i + i // 7) % 5] for i in range(1200))})


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Each text in the file of its path below the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_program(path: Path, text: str) -> str:
    """A script that can be started by its path, which this returns."""
    write_files(path.parent, {path.name: text})
    path.chmod(0o755)
    return str(path)


def copy_checkout(folder: Path) -> Path:
    """The files of this checkout that git tracks or would track; links are entries of their own."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(REPO / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name, follow_symlinks=False)
    return folder
