"""The core of the suite on the oldest torch and deepspeed that setup.cfg allows, in an environment of its own."""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
# Not the byte-exact state: an older DeepSpeed may keep parameters gathered for longer.
CORE = ["tests/strategies/test_parity.py", "tests/strategies/test_features.py"]


def oldest() -> dict[str, str]:
    """package -> the lower bound of its range."""
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg")
    requirements = parser["options"]["install_requires"].split()
    return dict(match.groups() for r in requirements if (match := re.match(r"([\w.-]+)>=([\w.]+)", r)))  # type: ignore[misc]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with those versions; kept between runs, it is gigabytes."""
    bounds = oldest()
    pinned = [f"{name}=={bounds[name]}" for name in ("torch", "deepspeed")]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardkit-tests"
    folder = cache / f"oldest-{hashlib.blake2b(repr((pinned, sys.version)).encode(), digest_size=6).hexdigest()}"
    interpreter = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        others = [name for name in bounds if name not in ("torch", "deepspeed")]
        for packages in (["pip>=25.3"], [pinned[0]], [*pinned, *others, "pytest", "pytest-timeout", "hypothesis"]):
            subprocess.run([str(interpreter), "-m", "pip", "install", "-q", "-U", *packages], check=True)
        (folder / ".installed").touch()
    if not (folder / ".built").exists():
        build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"  # minutes, once
        subprocess.run([str(interpreter), "-c", build], check=True, env=environment(interpreter))
        (folder / ".built").touch()
    return interpreter


def environment(interpreter: Path) -> dict[str, str]:
    """Its own tools first (ninja), and ops compiled against one torch are not shared with another."""
    ops = interpreter.parent.parent / "ops"
    path = f"{interpreter.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {
        **os.environ,
        "PATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(ops),
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_core_passes_on_the_oldest_supported_versions(python: Path) -> None:
    versions = subprocess.run(
        [str(python), "-c", "import torch, importlib.metadata as m; print(torch.__version__, m.version('deepspeed'))"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    bounds = oldest()
    assert versions[0].startswith(bounds["torch"])
    assert versions[1].startswith(bounds["deepspeed"])
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CORE],
        cwd=REPO, env=environment(python), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
