"""A training script of the user's own: checked before it starts, and judged by the checkpoints that it writes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from dataclasses import asdict, dataclass, fields, replace
from importlib.machinery import PathFinder
from pathlib import Path

from ..errors import LaunchError

ON_PREEMPT = ("term", "usr1", "usr2", "file")
PREEMPT_FILE = "SHARDKIT_PREEMPT_FILE"
"""The variable that names the file which appears when a job is preempted."""
HEARTBEAT = "SHARDKIT_HEARTBEAT"
"""The variable that names the folder in which each rank touches a file named by its LOCAL_RANK."""
AUTO = "auto"
_NO_PYTHON = (".yaml", ".yml", ".json", ".toml", ".sh", ".bash", ".sbatch")
_HOW = "shardkit launch [options] -- train.py arguments, or -- -m package.module arguments"


@dataclass(frozen=True)
class Script:
    """A program that torchrun or srun starts once per rank. It need not import shardkit."""

    argv: tuple[str, ...]  # `FILE argument…` or `-m MODULE argument…`
    # how the script learns that its job is preempted: SIGTERM, SIGUSR1, SIGUSR2, or a file that appears
    on_preempt: str = "term"
    # `auto`, or a file that ranks touch while they make progress; `{local_rank}` in it is the rank's number on its
    # machine. None = no watchdog.
    heartbeat: str | None = None
    heartbeat_timeout_s: float = 600.0  # seconds without a heartbeat after which a rank counts as hung
    # the folder where the script writes its checkpoints; new files in it are a job's progress
    checkpoints: str | None = None
    grace_s: float = 25.0  # seconds that ranks get to end by themselves after the launcher's SIGTERM

    @property
    def name(self) -> str:
        """A short name for directories: the script's file name without its suffix, or the module's last word."""
        word = self.argv[1].rpartition(".")[2] if self.argv[0] == "-m" else Path(self.argv[0]).stem
        return re.sub(r"[^\w.-]", "_", word) or "script"

    def numbered(self, index: str) -> Script:
        """The script of one task of a job array: `%a` becomes the task's index."""

        def numbered(text: str | None) -> str | None:
            return text and text.replace("%a", index)

        argv = tuple(word.replace("%a", index) for word in self.argv)
        return replace(self, argv=argv, heartbeat=numbered(self.heartbeat), checkpoints=numbered(self.checkpoints))

    def launch_options(self) -> list[str]:
        """The options of `shardkit launch` for this script, without its own words."""
        options = ["--on-preempt", self.on_preempt, "--grace-s", f"{self.grace_s:g}"]
        if self.heartbeat is not None:
            options += ["--heartbeat", self.heartbeat, "--heartbeat-timeout", f"{self.heartbeat_timeout_s:g}"]
        return options

    def as_json(self) -> str:
        """This description as text, for a job's snapshot."""
        return json.dumps(asdict(self), indent=1) + "\n"


def from_json(text: str, file: str) -> Script:
    """The description in a job's snapshot."""
    names = {field.name for field in fields(Script)}
    try:
        description = json.loads(text)
        script = Script(**{name: value for name, value in description.items() if name in names})
        return Script(**{**asdict(script), "argv": tuple(str(word) for word in script.argv)})
    except (ValueError, TypeError, AttributeError) as error:
        raise LaunchError(f"{file} does not describe a script: {error}", "submit the job again") from error


def check(script: Script, cwd: Path | None) -> None:
    """Refuse a script that cannot start. `cwd`: where it will start; None = in an image, whose files cannot be seen
    from here."""
    program = script.argv[0] if script.argv else ""
    if not program:
        raise LaunchError("nothing follows `--`", _HOW)
    if re.fullmatch(r"python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun", Path(program).name):
        raise LaunchError(f"`-- {program}`: the ranks are started by shardkit, with its own interpreter", _HOW)
    if program == "-m":
        if len(script.argv) < 2 or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", script.argv[1]):
            raise LaunchError("-m is not followed by a module's name", _HOW)
        missing = None if cwd is None else missing_module(script.argv[1], cwd)
        if missing is not None:
            raise LaunchError(
                f"there is no module {missing} in {cwd} or among the packages of {sys.executable}",
                "correct the name, start from the folder that holds it, or install the package",
            )
    elif program.startswith("-"):
        raise LaunchError(f"`-- {program}`: a script or -m MODULE must follow `--`", _HOW)
    elif Path(program).suffix in _NO_PYTHON:
        raise LaunchError(
            f"`-- {program}` is not a Python script",
            "name the .py file or -m MODULE that it starts; a config of shardkit stands without `--`",
        )
    elif cwd is not None and (problem := _problem(cwd / program)):
        raise LaunchError(f"{program} {problem}", f"name a file that exists from {cwd}, or a module with -m")
    if script.on_preempt not in ON_PREEMPT:
        raise LaunchError(f"--on-preempt {script.on_preempt!r} is not known", f"pass one of {', '.join(ON_PREEMPT)}")
    if not 1 <= script.heartbeat_timeout_s < 1e9:
        raise LaunchError(f"--heartbeat-timeout {script.heartbeat_timeout_s:g} is out of range", "pass seconds from 1")
    check_grace(script.grace_s)


def check_grace(seconds: float) -> None:
    """Refuse a time to save and end that is none."""
    if not 0 <= seconds < 1e9:
        raise LaunchError(f"--grace-s {seconds:g} is out of range", "pass seconds from 0")


def _problem(path: Path) -> str:
    """Why Python cannot run the file or directory; empty if it can."""
    if path.is_dir():
        return "" if (path / "__main__.py").is_file() else "is a directory without a __main__.py"
    return "" if path.is_file() else "is not a regular file" if path.exists() else "does not exist"


def missing_module(name: str, cwd: Path) -> str | None:
    """The part of a module's name that `python -m name` could not find; None if it finds all. Runs none of its code."""
    parts = name.split(".")
    path = [str(cwd), *sys.path]
    spec = PathFinder.find_spec(parts[0], path) or importlib.util.find_spec(parts[0])
    for depth in range(1, len(parts) + 1):
        if spec is None:
            return ".".join(parts[:depth])
        locations = spec.submodule_search_locations
        if depth < len(parts):
            submodule = ".".join(parts[: depth + 1])
            spec = PathFinder.find_spec(submodule, list(locations)) if locations is not None else None
            if spec is None:
                return submodule
    assert spec is not None
    if spec.submodule_search_locations is not None and not any(
        (Path(folder) / "__main__.py").is_file() for folder in spec.submodule_search_locations
    ):
        return f"{name}.__main__"
    return None


def newest_change(folder: str | None) -> int:
    """When the newest file below a folder changed, in ns since the epoch; 0 if there is none, or no folder."""
    newest = 0
    for parent, _, names in os.walk(folder) if folder is not None else ():
        for name in names:
            try:
                newest = max(newest, os.stat(os.path.join(parent, name)).st_mtime_ns)
            except OSError:  # deleted meanwhile
                continue
    return newest
