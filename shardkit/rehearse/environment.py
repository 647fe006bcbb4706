"""The interpreter that a command starts, and its torch: found by asking the interpreter."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError, printable
from ..files import code_command

OLDEST = (2, 5)
"""Of torch's releases, those that the emulation has been built for begin here."""
OF_A_REHEARSAL = ("SHARDKIT_REHEARSAL", "SHARDKIT_COMPUTED")
"""Variables that ready the emulated GPUs in a process: with kernels that do nothing, or that compute."""
_PROBE = """
import importlib.util, json, runpy, sys
spec = importlib.util.find_spec("torch")
folder = next(iter(spec.submodule_search_locations or []), None) if spec else None
about = runpy.run_path(folder + "/version.py") if folder else {}
print(json.dumps({"executable": sys.executable, "prefix": sys.prefix, "folder": folder,
    "version": about.get("__version__"), "cuda": about.get("cuda"), "hip": about.get("hip")}))
"""
"""Reads torch's version file without importing torch, which takes seconds."""


@dataclass(frozen=True)
class Torch:
    """The CUDA build of torch in a command's environment."""

    python: str  # the interpreter that runs the command
    site: Path  # the folder that torch lies in, beside NVIDIA's wheels
    version: str  # `2.13.0+cu130`
    cuda: str  # the version of CUDA that it was built for: `13.0`

    @property
    def cuda_major(self) -> str:
        return self.cuda.partition(".")[0]


def torch_of(command: Sequence[str], environ: Mapping[str, str]) -> Torch:
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        cause = f"GPUs are emulated on Linux only, and this is {sys.platform} on {os.uname().machine}"
        raise LaunchError(cause, "rehearse on a Linux machine or in a Linux container")
    return check(ask(interpreter(command, environ), environ))


def interpreter(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words that start the interpreter of a command: `python3`, or those in the first line of its script."""
    path = shutil.which(command[0], path=environ.get("PATH", os.defpath))
    if path is None and command[0].endswith(".py") and os.path.isfile(command[0]):
        fix = f"shardkit rehearse … -- {shlex.join(['python', *command])}"
        raise LaunchError(f"{command[0]} is a script that cannot be run by its name", fix)
    if path is None and command[0].startswith("-"):
        fix = f"shardkit rehearse … -- {shlex.join(['python', *command])}"
        raise LaunchError(f"{command[0]} is an option and no program", fix)
    if path is None:
        raise LaunchError(f"there is no program {command[0]}", "check its name, and that its environment is active")
    words, options = [path], list(command[1:])
    if not _is_python(path):
        with open(path, "rb") as file:
            line = file.readline(4096)
        words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
        if words and os.path.basename(words[0]) == "env":
            words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        if words and os.path.basename(words[0]) in ("sh", "bash", "dash", "zsh"):
            words = _shell_trampoline(path)
        if not words or not _is_python(words[0]):
            cause = f"{command[0]} is not a Python program, so the interpreter that it may start cannot be asked"
            fix = "name the Python program itself (python, torchrun, accelerate, …), in its environment"
            raise LaunchError(cause, fix)
        path, options = shutil.which(words[0], path=environ.get("PATH", os.defpath)), words[1:]
        if path is None:
            raise LaunchError(f"{command[0]} starts {words[0]}, which is not there", "activate its environment")
        words = [path]
    refuse_isolated(options, command[0])
    return words


def refuse_isolated(words: Sequence[str], program: str) -> None:
    """Refuse options of Python by which it reads no PYTHONPATH, or nothing that it would load from there."""
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-") or word in ("-", "--"):
            return
        if word.startswith("--"):
            next(remaining, None) if word == "--check-hash-based-pycs" else None
            continue
        for index, letter in enumerate(word[1:], start=2):
            if letter in "IES":
                cause = f"{program} {word} lets Python ignore its environment, through which GPUs are emulated"
                raise LaunchError(cause, f"leave -{letter} out for the rehearsal")
            if letter in "mc":
                return
            if letter in "WX":
                next(remaining, None) if index == len(word) else None
                break


def ask(python: Sequence[str], environ: Mapping[str, str]) -> dict[str, str | None]:
    """The answers of `_PROBE` by an interpreter."""
    clean = {name: text for name, text in environ.items() if name not in (*OF_A_REHEARSAL, "EMUCUDA")}
    try:
        process = subprocess.run(
            [*python[:-1], *code_command(_PROBE, python[-1])], env=clean, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        answers = json.loads(process.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        cause = f"{shlex.join(python)} does not answer as Python does: {printable(error)}"
        raise LaunchError(cause, f"check that {shlex.join(python)} -c 'print(1)' works") from error
    return {str(name): answer for name, answer in answers.items()}


def check(answers: Mapping[str, str | None]) -> Torch:
    python, folder, version, cuda = (answers[name] for name in ("executable", "folder", "version", "cuda"))
    if folder is None or version is None:
        raise LaunchError(f"{python} has no torch", "install torch there, or name the Python that has it")
    if cuda is None:
        build = "a ROCm build" if answers.get("hip") else "a CPU build"
        cause = f"torch {version} of {python} is {build}: a rehearsal runs torch's own CUDA code"
        wheel = f"pip install torch=={version.partition('+')[0]} from an index with CUDA wheels (PyPI has them)"
        raise LaunchError(cause, f"{wheel}, in an environment of its own; no GPU is needed")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        cause = f"torch {version} of {python} is older than {'.'.join(map(str, OLDEST))}, the oldest that is emulated"
        raise LaunchError(cause, "rehearse with a newer torch in an environment of its own")
    return Torch(str(python), Path(folder).parent, version, cuda)


def _is_python(path: str) -> bool:
    """Whether a program's own name is that of an interpreter; environments link theirs to others."""
    return re.fullmatch(r"(python|pypy)[\d.]*(-\w+)?", os.path.basename(path)) is not None


def _shell_trampoline(path: str) -> list[str]:
    """The interpreter of a script by pip or uv that lets a shell start Python, as its path is long or has spaces."""
    with open(path, "rb") as file:
        lines = file.read(8192).decode(errors="replace").splitlines()[1:2]
    match = re.match(r"""'''exec' (.+) "\$0" "\$@\"""", lines[0]) if lines else None
    return shlex.split(match[1]) if match else []
