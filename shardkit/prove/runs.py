"""Run a program under the recorder, in the sandbox of a rehearsal, until it has done the steps of a plan."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import LaunchError, one_line
from ..launch.local import processes
from ..rehearse.build import entry_points
from ..rehearse.environment import ask, interpreter
from ..rehearse.rehearsal import (
    TRACKERS_OFF,
    Limits,
    Machine,
    delete,
    emulated_environ,
    refuse_without_sandbox,
    start_in_sandbox,
    summary,
)
from .inject import shardkit_pieces as pieces

INJECT = Path(__file__).parent / "inject"
_ON_CPU = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
"""Variables by which programs choose the CPU; those that the user has set stay."""
_OF_LAUNCHER = re.compile(r"torch\.distributed\.elastic\.\S+ChildFailedError|subprocess\.CalledProcessError")
_OF_RECORDER = re.compile(
    r'shardkit_(?:proof|pieces|zero)\.py", line \d+, in '
    r"(?!watched|run|without_dropout|attend_without_dropout|made|drawn|fetched)\w+"
)
"""A frame of the recorder in a traceback, but for those of the functions that only hand a call on."""
OF_TORCHS_LOG = re.compile(r"\[?[EWI]\d{4} ")
"""Begins lines of torch's own log."""
_UNSHARED = [f"parallel.{key}=1" for key in ("tp", "cp", "ep", "dp_replicate", "dp_shard")]
_UNSHARED += ["parallel.tp_sequence=false"]
_COUNT = re.compile(r"(--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)[= ])\S+")


@dataclass(frozen=True)
class PlannedStep:
    """A step of a run, and its parallel counterpart where one process takes it."""

    name: str  # of its records
    weights: int | None = None  # it begins with the parallel run's weights after so many steps
    gradients: int | None = None  # the optimizer gets the gradients of this step of the parallel run
    moved: bool = False  # each weight is moved by one ulp
    shares: bool = False  # each backward's own change of the gradients is recorded
    gradients_only: bool = False  # the weights after the step are not recorded

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class RecordedRun:
    """What one start of a program has recorded."""

    folder: Path  # of its records
    steps: tuple[str, ...]  # the names of those that all ranks have done, in order
    code: int  # the exit code; negative: a signal
    log: str  # what the program printed, the end of it
    is_late: bool = False  # the time limit ended it
    notes: tuple[str, ...] = ()  # what its writes would have changed

    def record(self, name: str) -> dict[int, dict[str, Any]]:
        return pieces.read(str(self.folder), name)

    @property
    def is_of_recorder(self) -> bool:
        """Whether the error comes from the recorder, and not from a function of the program that it calls."""
        return bool(_OF_RECORDER.search(self.log))

    def lines(self) -> list[str]:
        """What the program printed, without marks of ranks and empty lines."""
        lines = [re.sub(r"^\[(rank\d+|default\d+)\]:? ?", "", line) for line in self.log.splitlines()]
        return [line for line in lines if line.strip()]

    def error(self) -> str:
        """The program's first error: the last line of its first traceback with its place, or what Python or a parser
        of arguments printed before the launcher's own traceback."""
        lines = self.lines()
        start = next((i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")), len(lines))
        location = ""
        for line in lines[start:]:
            if (frame := re.match(r' +File "(.+)", line (\d+)', line)) and not re.search(
                r"/lib/python|<|shardkit_(p|zero|leaks)", frame[1]
            ):
                location = f" ({os.path.basename(frame[1])}:{frame[2]})"
            if not line.startswith((" ", "Traceback")):
                if _OF_LAUNCHER.match(line):  # it says no more than that a process failed
                    break
                return one_line(line) + location
        errors = [line for line in lines[:start] if re.search(r"error|can't open file", line, re.IGNORECASE)]
        ends = [match[0] for line in lines if (match := re.search(r"failed \(exitcode: -?\d+\)", line))]
        printed = [*[line for line in errors if not OF_TORCHS_LOG.match(line)][:1], *ends, *lines[-1:]]
        return one_line(printed[0]) if printed else "it printed nothing"


@dataclass
class Runner:
    """Starts programs, each start in a folder of its own."""

    folder: Path
    limits: Limits
    machine: Machine | None = None  # whose emulated cards the program uses; None: the CPU, over gloo
    sampled_above: int = pieces.SAMPLED_ABOVE  # numbers of a tensor
    n_started: int = 0

    def start(self, command: Sequence[str], steps: Sequence[PlannedStep], **plan: Any) -> RecordedRun:
        """Run a command until it has done these steps or ends. `plan`: `parallel` (a folder of records), `feed`."""
        self.n_started += 1
        folder = self.folder / f"run{self.n_started}"
        records = folder / "records"
        records.mkdir(parents=True)
        plan |= {"steps": [step.as_json() for step in steps], "sampled_above": self.sampled_above}
        (folder / "plan.json").write_text(json.dumps(plan))
        code, is_late = self.execute(command, folder, len(steps))
        names = []
        for step in steps:
            ranks = pieces.read(str(records), step.name)
            if not ranks or len(ranks) < len(pieces.read(str(records), "start")):
                break
            names.append(step.name)
        log = (folder / "log").read_text(errors="replace")[-20_000:]
        return RecordedRun(records, tuple(names), code, log, is_late, tuple(summary(folder)))

    def kept_log(self, run: RecordedRun) -> str:
        """Where a run's output can be read."""
        path = run.folder.parent / "log"
        return f"its output: {path}" if self.limits.keep else "its output: with --keep DIR"

    def execute(self, command: Sequence[str], folder: Path, n_steps: int) -> tuple[int, bool]:
        """The exit code of a command, and whether the time limit ended it."""
        environ = self._environ(folder)
        environ["SHARDKIT_PROOF"] = str(folder / "records")
        environ["SHARDKIT_PROOF_PLAN"] = str(folder / "plan.json")
        paths = [str(injected(self.folder)), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)  # without it torch loads no recorder
        if not self.limits.network:
            environ["GLOO_SOCKET_IFNAME"] = environ["TP_SOCKET_IFNAME"] = "lo"
        with open(folder / "log", "wb") as log:
            process = start_in_sandbox(command, folder, environ, self.limits, log)
            try:
                is_late = self._wait(process, folder / "records")
            finally:
                processes.stop(process, signal.SIGKILL, 0.5)
        refuse_without_sandbox(process, folder, self.limits, "prove")
        for name in ("root", "work"):
            delete(folder / name)
        return process.returncode, is_late

    def _environ(self, folder: Path) -> dict[str, str]:
        """This process's environment, with trackers off: without cards, or with emulated ones."""
        if self.machine is not None:
            environ = emulated_environ(self.machine, self.limits, folder)
            return {"OMP_NUM_THREADS": "1", **environ, "SHARDKIT_COMPUTED": str(folder / "records")}
        return {
            **os.environ, **TRACKERS_OFF, **{name: os.environ.get(name, text) for name, text in _ON_CPU.items()},
            **({} if self.limits.network else {"HF_HUB_OFFLINE": "1"}),
            "CUDA_VISIBLE_DEVICES": "", "MLFLOW_TRACKING_URI": f"file:{folder / 'mlruns'}",
        }  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes], records: Path) -> bool:
        """Wait for a program's end; True if it had to be ended."""
        deadline = time.monotonic() + self.limits.time_limit_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                return True
            time.sleep(0.05)
        return False


def injected(folder: Path) -> Path:
    """The folder for PYTHONPATH through which torch loads the recorder."""
    path = folder / "inject"
    if not path.exists():
        path.mkdir()
        for name in ("shardkit_proof", "shardkit_pieces", "shardkit_zero", "shardkit_leaks"):
            shutil.copy(INJECT / f"{name}.py", path)
        entry_points(path, "shardkit_proof", "shardkit_proof = shardkit_proof:attach")
    return path


def check(command: Sequence[str], against: str | None) -> None:
    """Refuse a command that starts no Python or has no process to compare with, or whose torch loads no recorder."""
    python = interpreter(command, os.environ)
    if against is None and one_process(command) is None:
        cause = f"{command[0]} names no number of processes, so that one process cannot be started from it"
        raise LaunchError(cause, "name the program of one process: --against 'python train.py --bs 8'")
    answers = ask(python, os.environ)
    version = answers["version"]
    if version is None:
        raise LaunchError(
            f"{answers['executable']} has no torch", "install torch there, or name the Python that has it"
        )
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 5):
        raise LaunchError(f"torch {version} loads no recorder: it begins with 2.5", "prove with a newer torch")


def one_process(command: Sequence[str]) -> list[str] | None:
    """The same command with one process; None if its words name no number of processes."""
    text, count = _COUNT.subn(r"\g<1>1", shlex.join(command))
    if not count:
        return None
    words = shlex.split(text)
    # One process has nobody to share with; the last of two overrides wins.
    return words + _UNSHARED if ("-m", "shardkit.train") in pairwise(words) else words


def say(text: str) -> None:
    """Tell how far the proof is."""
    print(f"proving: {text}", file=sys.stderr, flush=True)
