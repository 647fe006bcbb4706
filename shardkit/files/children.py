"""Child processes that run nothing which lies in the current directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL

_ROOT = str(Path(__file__).resolve().parents[2])
_WITHOUT_CURRENT_DIRECTORY = "import sys; sys.path[:] = [path for path in sys.path if path]\n"
RUN_MODULE = Path(__file__).resolve().with_name("run_module.py")
"""A program that runs a module safely where a command line should be short, and the file is there at the start."""
_RUN_MODULE = f"""sys.path.append({_ROOT!r})
import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"""
"""Takes the module's name from the arguments, where `ps` shows it."""


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """The start of a command line that runs a module of shardkit as `python -m` would, arguments to follow.

    `python -m` searches the current directory first. In a folder that somebody else filled, that would run their
    `typing.py` instead of Python's. Python 3.10 has no option against it (`-P` came with 3.11), so the child removes
    the directory from its path before it imports anything. A task of the user's own is still found there:
    `shardkit.tasks.load` adds the directory when a config names one. A `python` without shardkit finds this copy.
    """
    return [*code_command(_RUN_MODULE, python), module]


def code_command(code: str, python: str = sys.executable) -> list[str]:
    """A command line that runs Python code which imports nothing from the current directory, unlike `python -c`."""
    return [python, "-c", _WITHOUT_CURRENT_DIRECTORY + code]


_OFF = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "diff.external=")
"""Settings of a repository that name programs, and the values with which git starts none."""
_OPTIONS = {
    "diff": ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "--submodule=short"),
    "status": ("--ignore-submodules=dirty",),
}
"""Options that keep git from starting programs. Submodules have settings of their own: git may not enter them."""


def read_git(*arguments: str, cwd: Path | None = None) -> str | None:
    """The output of a git command that only reads, stripped; None without git or a repository that can be asked safely.

    A repository's own `.git/config` may name programs for git to run: a file-system monitor, diff drivers, filters, and
    whatever fetches the objects that a partial clone lacks. A downloaded repository is a stranger's, so none of its
    programs runs. Filters and diff drivers in the user's own settings do.
    """
    subcommand, *options = arguments
    query = ["config", "--includes", "--show-scope", "--name-only", "-z", "--get-regexp", r"^filter\."]
    words = (_git(query, cwd) or "").split("\0")
    filters = [name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in ("local", "worktree")]
    if any("=" in name for name in filters):  # `-c` would switch another one off
        return None
    off = [*_OFF, *(f"{name}={'false' if name.endswith('.required') else ''}" for name in filters)]
    words = [word for setting in off for word in ("-c", setting)]
    return _git([*words, subcommand, *_OPTIONS.get(subcommand, ()), *options], cwd)


def _git(words: list[str], cwd: Path | None) -> str | None:
    env = {**os.environ, "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}
    try:
        output = subprocess.check_output(["git", *words], cwd=cwd, env=env, stderr=DEVNULL, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return output.strip()
