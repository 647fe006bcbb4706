"""The virtual environment for the comparison with other libraries: made once, and again when a pin changes."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from .common import REPO

PEERS = "peers"
"""benchmarks/peers.txt, and so benchmarks/.venv-peers; another benchmark has a list of its own."""


def enter(name: str = PEERS) -> None:
    """Restart the same module in the environment of benchmarks/NAME.txt; returns at once inside it."""
    if Path(sys.prefix).resolve() == _venv(name).resolve():
        return
    python = str(make(name))
    # "-m benchmarks.peers": how it was started, from the interpreter's own record.
    os.execv(python, [python, *sys.orig_argv[1:]])


def _venv(name: str) -> Path:
    return REPO / "benchmarks" / f".venv-{name}"


def make(name: str = PEERS) -> Path:
    """The environment's interpreter; installs benchmarks/NAME.txt and shardkit if needed.

    torch comes first and alone: pip then takes the build of its settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS); a
    CPU-only one is gigabytes smaller.
    """
    pins, constraints = REPO / "benchmarks" / f"{name}.txt", REPO / "constraints.txt"
    pinned = "".join(path.read_text() for path in (pins, constraints, REPO / "setup.cfg"))
    constrained = ["-c", str(constraints)]
    everything = [*constrained, "-r", str(pins), "-e", str(REPO)]
    return installed(_venv(name), pinned, [["--upgrade", "pip>=25.3"], [*constrained, "torch"], everything])


def installed(directory: Path, pinned: str, installs: Sequence[Sequence[str]]) -> Path:
    """The interpreter of a virtual environment, made anew if it was not made for the same `pinned`.

    Args:
        installs: what pip is told to install, one call after the other.
    """
    directory = directory.resolve()
    python, stamp = directory / "bin" / "python", directory / "installed"
    if not stamp.exists() or stamp.read_text() != pinned:
        print(f"installing into {directory} (once; torch is large and takes minutes)", flush=True)
        venv.create(directory, clear=True, with_pip=True)
        quietly = {**os.environ, "PYTHONWARNINGS": "ignore"}  # setuptools warns about every editable install
        quietly.pop("PYTHONPATH", None)  # pip would take a checkout on it, or here, for installed in part
        for words in installs:
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *words]
            subprocess.run(pip, env=quietly, cwd=directory, check=True)
        stamp.write_text(pinned)
    return python
