"""The batch script of a job and its step's container options, as pure functions."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import LaunchError
from ..spec import JobSpec
from .preemption_warning import DEFAULT_S

_TEMPLATES = Path(__file__).parent.parent.parent / "slurm"
_MARK = "# ---- what runs\n"
_TEMPLATE_OF = {"torchrun": "train.sbatch", "srun": "train_srun.sbatch"}


def render_sbatch(spec: JobSpec) -> str:
    """The whole script for sbatch: `#SBATCH` lines from the spec, then the template's own commands. Everything from the
    user is quoted, for sbatch in the header and for bash below."""
    for name, value in (("name", spec.name), ("run.dir", spec.run_dir), ("directory", spec.cwd)):
        _one_line(name, value)
    slurm = spec.slurm
    settings: dict[str, object] = {
        "SHARDKIT_PYTHON": spec.python,
        "NPROC_PER_NODE": spec.nproc_per_node,
        "SHARDKIT_MAX_REQUEUES": slurm.max_requeues,
        "SHARDKIT_SIGNAL_S": slurm.signal_s,
        "SHARDKIT_MAX_RESTARTS": spec.max_restarts or None,
        "SHARDKIT_CONTAINER": slurm.container or None,
        "SHARDKIT_CONTAINER_MOUNTS": slurm.container_mounts or None,
    }
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in settings.items() if value is not None]
    words = ["--script"] if spec.script is not None else []
    arguments = shlex.join([*words, spec.config or "-", *spec.overrides])
    body = _MARK + (_TEMPLATES / _TEMPLATE_OF[slurm.style]).read_text().partition(_MARK)[2]
    header = [f"#SBATCH {_header_word(line)}" for line in header_options(spec)]
    return "\n".join(["#!/bin/bash", *header, "", *exports, f"set -- {arguments}", "", body])


def header_options(spec: JobSpec) -> list[str]:
    """sbatch's options in command-line form."""
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
        "signal": f"B:USR2@{DEFAULT_S if slurm.signal_s is None else slurm.signal_s}",
        "comment": f"shardkit {spec.run_dir}",
    }
    lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*lines, "--requeue", *slurm.extra]


def output_pattern(path: str) -> str:
    """`path` for --output, where `%j` means the job's id."""
    if "\\" in path:
        raise LaunchError(f"run.dir={path!r} has a backslash: Slurm cannot write output there", "rename it")
    return path.replace("%", "%%")


def _header_word(option: str) -> str:
    """An option quoted for `#SBATCH` lines, where quotes group and a backslash escapes the next character."""
    _one_line("an option", option)
    if all(c.isalnum() or c in "-_=./:@%,+" for c in option):
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _one_line(name: str, value: str) -> None:
    if "\n" in value or "\r" in value or "\0" in value:
        raise LaunchError(f"{name} {value!r} holds a line break", "remove it")


CONTAINER_PYTHON = "python3"
"""The image's interpreter, which must have shardkit."""


def srun_options(image: str, paths: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """srun's options for `image`, with `paths` mounted at the same place as outside. `environ`:
    SHARDKIT_CONTAINER_MOUNTS holds more mounts in pyxis' format, `SRC:DST[:ro],...`."""
    mounts: list[str] = []
    for path in paths:
        if any(c in path for c in ":,"):
            raise LaunchError(f"{path} cannot be mounted in a container: it has a ':' or ','", "rename it")
        if not any(path == outer or path.startswith(outer + os.sep) for outer in mounts):
            mounts.append(path)
    added_mounts = [environ["SHARDKIT_CONTAINER_MOUNTS"]] if environ.get("SHARDKIT_CONTAINER_MOUNTS") else []
    listed = ",".join([*(f"{path}:{path}" for path in mounts), *added_mounts])
    return [f"--container-image={image}", f"--container-mounts={listed}", f"--container-workdir={mounts[0]}"]
