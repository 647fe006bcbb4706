"""The batch script of a job, as a pure function, and talking to Slurm's commands."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from ...errors import LaunchError
from ..job import JobSpec
from . import lead

_TEMPLATES = Path(__file__).parent.parent.parent / "slurm"
_MARK = "# ---- what runs\n"
_TEMPLATE_OF = {"torchrun": "train.sbatch", "srun": "train_srun.sbatch"}


def render_sbatch(spec: JobSpec) -> str:
    """The whole script for sbatch: `#SBATCH` lines from the spec, then the template's own commands.

    Everything that came from a user is quoted, in the header as sbatch reads it and below as bash does.

    Raises:
        LaunchError: a value that no quoting can carry (a line break; a backslash in the run directory).
    """
    for name, value in (("name", spec.name), ("run.dir", spec.run_dir), ("directory", spec.cwd)):
        _one_line(name, value)
    settings = {"SHARDKIT_PYTHON": spec.python, "NPROC_PER_NODE": str(spec.nproc_per_node)}
    settings["SHARDKIT_MAX_REQUEUES"] = str(spec.slurm.max_requeues)
    if spec.max_restarts:
        settings["SHARDKIT_MAX_RESTARTS"] = str(spec.max_restarts)
    if spec.slurm.container:
        settings["SHARDKIT_CONTAINER"] = spec.slurm.container
    if spec.slurm.container_mounts:
        settings["SHARDKIT_CONTAINER_MOUNTS"] = spec.slurm.container_mounts
    exports = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    arguments = shlex.join([spec.config or "-", *spec.overrides])
    header = [f"#SBATCH {_header_word(line)}" for line in header_options(spec)]
    return "\n".join(["#!/bin/bash", *header, "", *exports, f"set -- {arguments}", "", _body(spec.slurm.style)])


def header_options(spec: JobSpec) -> list[str]:
    """sbatch's options, as on its command line."""
    slurm = spec.slurm
    number = "%A_%a" if slurm.array else "%j"
    options: dict[str, object] = {
        "job-name": spec.name,
        "nodes": spec.nodes[1],
        "ntasks-per-node": 1 if slurm.style == "torchrun" else spec.nproc_per_node,
        "gpus-per-node": spec.gpus_per_node or None,
        "cpus-per-task": slurm.cpus_per_task,
        "mem": slurm.mem,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "array": slurm.array,
        "dependency": slurm.dependency,
        "chdir": spec.cwd,
        "output": f"{output_pattern(spec.run_dir)}/logs/slurm-{number}.out",
        "open-mode": "append",
        "signal": f"B:USR2@{lead.DEFAULT_S if slurm.signal_s is None else slurm.signal_s}",
        "comment": f"shardkit {spec.run_dir}",
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*given, "--requeue", *slurm.extra]


def output_pattern(path: str) -> str:
    """`path` for --output, where `%j` means the job's id.

    Raises:
        LaunchError: a backslash, which would switch that off for the whole pattern.
    """
    if "\\" in path:
        raise LaunchError(f"run.dir={path!r} has a backslash, which Slurm cannot write output under", "rename it")
    return path.replace("%", "%%")


def require(program: str) -> None:
    """Check that one of Slurm's commands is there.

    Raises:
        LaunchError: it is not.
    """
    if shutil.which(program) is None:
        raise LaunchError(
            f"Slurm is not installed on this machine: there is no {program}",
            "run this where jobs are submitted, or train here with `shardkit launch CONFIG --nproc-per-node N`",
        )


def call(program: str, *args: str) -> str:
    """Output of one of Slurm's commands.

    Raises:
        LaunchError: Slurm is not installed here, or the command refused, with its own reason.
    """
    require(program)
    done = subprocess.run([program, *args], capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip().removeprefix(f"{program}: error: ") for line in done.stderr.splitlines() if line.strip()]
        raise LaunchError(
            f"{program} refused: {'; '.join(lines) or f'exit code {done.returncode}'}", _advice(done.stderr)
        )
    return done.stdout


def ask(program: str, *args: str, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands from within a job, whose ranks go on whatever it says: never raises, never hangs.

    A controller that restarts does not answer for a while; then the return code is 124. Slurm ends a job that goes back
    to the queue with SIGTERM to all its processes: not to this one, which may be what leaves out a node.
    """
    argv = [program, *args]
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # a user may prefer relative times
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, env=environ, timeout=timeout_s,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 124, "", str(error))


def _advice(text: str) -> str:
    lower = text.lower()
    if "account" in lower or "qos" in lower:
        return "`sacctmgr show assoc user=$USER format=account,partition,qos` lists what you may use"
    if "partition" in lower:
        return "`sinfo -s` lists the partitions"
    if "time limit" in lower:
        return "`sinfo -o '%P %l'` shows the partitions' longest times"
    if any(word in lower for word in ("node configuration", "nodes", "gres", "processors", "memory")):
        return "`sinfo -o '%P %D %c %m %G'` shows what the partitions' nodes have"
    if "connect" in lower or "controller" in lower:
        return "`scontrol ping` tells whether the controller is up"
    return "correct the option and submit again"


def _body(style: str) -> str:
    text = (_TEMPLATES / _TEMPLATE_OF[style]).read_text()
    return _MARK + text.partition(_MARK)[2]


def _header_word(option: str) -> str:
    """An option as sbatch reads `#SBATCH` lines: quotes group, a backslash takes the next character as it is."""
    _one_line("an option", option)
    if all(c.isalnum() or c in "-_=./:@%,+" for c in option):
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _one_line(name: str, value: str) -> None:
    if "\n" in value or "\r" in value or "\0" in value:
        raise LaunchError(f"{name} {value!r} holds a line break", "remove it")
