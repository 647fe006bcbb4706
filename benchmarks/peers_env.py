"""The virtual environment for the comparison with other libraries: made once, and again when a pin changes."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
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
    directory, pins = _venv(name), REPO / "benchmarks" / f"{name}.txt"
    python, stamp = directory / "bin" / "python", directory / "installed"
    wanted = "".join(path.read_text() for path in (pins, REPO / "constraints.txt", REPO / "setup.cfg"))
    if not stamp.exists() or stamp.read_text() != wanted:
        print(
            f"installing the compared libraries into {directory} (once; torch is large, this takes minutes)", flush=True
        )
        venv.create(directory, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        constrained = [*pip, "-c", str(REPO / "constraints.txt")]
        subprocess.run([*pip, "--upgrade", "pip>=25.3"], check=True)
        subprocess.run([*constrained, "torch"], check=True)
        quietly = {**os.environ, "PYTHONWARNINGS": "ignore"}  # setuptools warns about every editable install
        subprocess.run([*constrained, "-r", str(pins), "-e", str(REPO)], env=quietly, check=True)
        stamp.write_text(wanted)
    return python
