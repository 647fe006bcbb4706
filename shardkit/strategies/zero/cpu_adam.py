"""Build DeepSpeedCPUAdam, a C++ op that is compiled at first use, once per machine."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from ...config.libraries import NameGone
from ...errors import BuildError
from ...files import locked
from ...parallel.world import World
from .state import BUILD_FOLDER, BUILDS

_BUILDING = "building"


def build_cpu_adam(world: World) -> None:
    """Compile DeepSpeedCPUAdam once per machine before its ranks load it.

    Raises:
        BuildError: the build failed; raised on every rank, with the compiler's first error.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builds = world.env.local_rank == 0
    folder = _build_folder(CPUAdamBuilder) if builds else None
    if builds and (folder is None or not (folder / f"{CPUAdamBuilder.NAME}.so").exists()):
        print("building DeepSpeedCPUAdam (once per machine, 1-3 minutes) ...", file=sys.stderr, flush=True)
    for my_turn in (builds, not builds):
        problem = _load(CPUAdamBuilder) if my_turn else ""
        problems = [str(p) for p in world.gather(problem) if p]
        if problems:
            raise BuildError(
                f"DeepSpeedCPUAdam does not compile: {problems[0]}",
                "install a C++ compiler and Python's headers (apt-get install g++ python3-dev; for DeepSpeed up to "
                "0.19.6 also CUDA's toolkit, named by CUDA_HOME), or set parallel.offload_optimizer=none",
            )


def _load(builder: Any) -> str:
    """Compile the op if needed and load it into this process; returns the compiler's first error, or ""."""
    # deepspeed's ninja lies beside the interpreter: not on PATH unless the venv is activated.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    try:
        remember_cpu()
        folder = _build_folder(builder)
        with nullcontext() if folder is None else sole_builder(folder):
            builder().load(verbose=False)
    except Exception as error:  # torch and deepspeed raise many kinds; all mean that the op is missing
        return first_compiler_error(str(error))
    return ""


def remember_cpu() -> None:
    """Make py-cpuinfo keep its answer: it takes a process of a second, and DeepSpeed asks for each optimizer."""
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def _build_folder(builder: Any) -> Path | None:
    """Where torch builds the op; None if torch does not say."""
    try:
        return Path(BUILD_FOLDER.find()(builder.NAME, verbose=False))
    except NameGone:
        BUILDS.lost(BUILD_FOLDER)
        return None


@contextmanager
def sole_builder(folder: Path) -> Iterator[None]:
    """Hold the right to build in this folder, and remove the lock file of a killed build.

    torch guards a build by a file that must not exist: after a killed build (Ctrl-C, a time limit) every later one
    would wait forever. The system releases our lock with its process, whatever ends it.
    """
    with locked(folder / "shardkit.lock", optional=True) as file:
        if file is None:  # a file system without locks: only torch's own guard is left
            yield
            return
        file.seek(0)
        if file.read() == _BUILDING:
            (folder / "lock").unlink(missing_ok=True)
        _write(file, _BUILDING)
        yield
        _write(file, "")


def _write(file: IO[str], text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def first_compiler_error(text: str) -> str:
    """The first line of a build log that names an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower() or "not found" in line.lower()]
    return (telling or lines or ["no message"])[0][:300]
