"""`shardkit submit`: check a job, keep a snapshot of it, write its batch script and hand it to Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ... import __version__
from ...errors import ConfigError, LaunchError, system_errors
from ...files import group_of_new_files, mode_like, read_git
from ..local.restart import has_run, refuse_without_run
from ..script import Script
from ..spec import JobSpec, SlurmOptions, check_fits
from . import commands
from .preemption_warning import DEFAULT_S, doubts, limit_s, signal_s
from .requeue import MAX_IDLE_STARTS

FOLDER = "submit"
CONFIG, SCRIPT, PATCH = "config.yaml", "script.json", "code.patch"
BATCH_SCRIPT = "job.sbatch"
_ITS_TURN = ("None", "Priority", "Resources", "Dependency", "BeginTime", "Licenses", "JobHeldUser", "JobArrayTaskLimit")
_WRITABLE = "set run.dir to a directory that you can write"


def write_snapshot(folder: Path, config: str, script: str, name: str = CONFIG) -> list[Path]:
    """Write a submission's snapshot to a folder that `reserve` made; returns the files.

    Files: config.yaml (resolved) or script.json (how a script of the user's own starts), job.sbatch (can be submitted
    again), code.json (versions, commit), code.patch (the changes since that commit, if any; closed to other users
    where the repository is).
    """
    files = {name: config, BATCH_SCRIPT: script, "code.json": json.dumps(code_version(), indent=1) + "\n"}
    patch = read_git("diff", "HEAD", "--binary")
    if patch:
        files[PATCH] = patch + "\n"
    with system_errors(LaunchError, f"cannot write {folder}", _WRITABLE):
        if patch:
            # Open to those who may read the working tree's root, and its files that differ from the last commit.
            root = Path(read_git("rev-parse", "--show-toplevel") or ".")
            changed = (read_git("diff", "HEAD", "--name-only", "-z") or "").split("\0")
            sources = [root, *(root / path for path in changed if path and (root / path).exists())]
            (folder / PATCH).touch(0o666 & mode_like(sources, group_of_new_files(folder)))
        for name, text in files.items():
            (folder / name).write_text(text)
    return [folder / name for name in files]


def reserve(run_dir: Path) -> Path:
    """Make a new folder for one submission, RUN_DIR/submit/N; later submissions never change an earlier job."""
    root = run_dir / FOLDER
    with system_errors(LaunchError, f"cannot write {root}", _WRITABLE):
        root.mkdir(parents=True, exist_ok=True)
        (run_dir / "logs").mkdir(exist_ok=True)
        while True:
            folder = _next(run_dir)
            with contextlib.suppress(FileExistsError):  # another submission was faster
                folder.mkdir()
                return folder


def _next(run_dir: Path) -> Path:
    numbers = [int(path.name) for path in (run_dir / FOLDER).glob("*") if path.name.isdecimal()]
    return run_dir / FOLDER / str(max(numbers, default=0) + 1)


def remove_snapshot(folder: Path) -> None:
    """Remove the snapshot of a refused job, and its directories if they are then empty."""
    shutil.rmtree(folder, ignore_errors=True)
    run_dir = folder.parent.parent
    with contextlib.suppress(OSError):  # not empty
        folder.parent.rmdir()
        (run_dir / "logs").rmdir()
        run_dir.rmdir()


def code_version() -> dict[str, object]:
    """Versions, the commits of the working directory and of shardkit, and the submitting command."""
    status = read_git("status", "--porcelain", "--untracked-files=no")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "host": platform.node(),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "shardkit_version": __version__,
        "shardkit_commit": read_git("rev-parse", "HEAD", cwd=Path(__file__).resolve().parent),
        "commit": read_git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


@dataclass(frozen=True)
class Submission:
    """A job that is ready to be submitted."""

    spec: JobSpec  # the job, with the snapshot's config instead of the user's
    config: str  # the resolved config as YAML; a script's description as JSON
    doubts: tuple[str, ...] = ()  # reasons why it may lose its work, to show to the user

    @property
    def script(self) -> str:
        """The script for sbatch."""
        return render_sbatch(self.spec)

    @property
    def file_name(self) -> str:
        """The name of the config's or description's file in the snapshot."""
        return CONFIG if self.spec.script is None else SCRIPT


@dataclass(frozen=True)
class Request:
    """What a job asks the cluster for."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    max_restarts: int = 0
    name: str | None = None  # the job's; None = by its run directory
    options: SlurmOptions = field(default_factory=SlurmOptions)

    def spec(self, run_dir: Path, file_name: str) -> JobSpec:
        """The job of a run directory, whose next snapshot has a file of that name."""
        return JobSpec(
            config=str(_next(run_dir) / file_name),
            run_dir=str(run_dir),
            nproc_per_node=self.ranks_per_node,
            nodes=(self.nodes, self.nodes),
            gpus_per_node=self.gpus_per_node,
            max_restarts=self.max_restarts,
            name=self.name or f"shardkit-{run_dir.name}",
            slurm=self.options,
        )


def prepare(config: str, overrides: Sequence[str], request: Request) -> Submission:
    """Check the config for these nodes and GPUs, and render the script; writes nothing."""
    array = request.options.array
    by_index = [item for item in overrides if "%a" in item and array is not None]
    from ...config.load import load_config

    fixed, path = [item for item in overrides if item not in by_index], None if config == "-" else config
    loaded = load_config(path, fixed)
    # The config has the overrides of all tasks; it is checked as the first task of an array has it.
    first_index = re.match(r"\d+", request.options.array or "")
    index = first_index[0] if first_index else "0"
    first_task = load_config(path, [*fixed, *(item.replace("%a", index) for item in by_index)])
    check_fits(first_task.config, request.nodes, request.ranks_per_node, request.gpus_per_node)
    run_dir = Path(loaded.config.run.dir).absolute()
    folders = [run_dir]
    if array is not None and loaded.config.run.resume is True:
        folders = [run_dir / f"array_{index}" for index in array_indices(array)]
    elif array is not None:
        folders = array_folders(run_dir, array)
    run = loaded.config.run
    for folder in folders:
        if not has_run(folder):
            refuse_without_run(folder, run.resume, {})  # a person submits it
        elif not run.overwrite and run.resume is False:
            raise ConfigError(
                f"{f'run.dir={run.dir}' if array is None else folder} already holds a run",
                "set run.resume=true to continue it, run.overwrite=true to delete it, or another run.dir",
            )
    spec = replace(request.spec(run_dir, CONFIG), overrides=tuple(by_index))
    return _ready(spec, loaded.render(), loaded.config.run.source, loaded.config.checkpoint.is_periodic)


def prepare_script(script: Script, run_dir: str, request: Request) -> Submission:
    """Render the job of a script that `launch.script.check` accepted; writes nothing."""
    if request.nodes < 1 or request.ranks_per_node < 1:
        raise LaunchError(
            f"--nodes {request.nodes} with {request.ranks_per_node} rank(s) per node", "ask for at least one of each"
        )
    if request.options.style == "srun" and script.heartbeat is not None:
        raise LaunchError("--heartbeat with --style srun: no launcher looks at the files", "leave --style at torchrun")
    spec = replace(request.spec(Path(run_dir).absolute(), SCRIPT), script=script)
    job = _ready(spec, script.as_json(), None, is_periodic=True)
    if script.checkpoints is not None:
        return job
    unseen = (
        "without --checkpoints DIR the script's progress cannot be seen: the job is started "
        f"{MAX_IDLE_STARTS} times at most; starts that Slurm ends for another job do not count"
    )
    return replace(job, doubts=(*job.doubts, unseen))


def _ready(spec: JobSpec, text: str, source: str | None, is_periodic: bool) -> Submission:
    """The job with this interpreter, this directory and the time of Slurm's warning. `text`: the resolved config, or
    the script's description. `source`: the run that this one continues."""
    run_dir = Path(spec.run_dir)
    lead = signal_s(spec.slurm.signal_s, run_dir, source)
    spec = replace(spec, python=sys.executable, cwd=os.getcwd(), slurm=replace(spec.slurm, signal_s=lead))
    render_sbatch(spec)
    limit = limit_s(spec.slurm.time or "")
    return Submission(spec, text, () if limit is None else tuple(doubts(limit, lead, run_dir, is_periodic)))


def submit(job: Submission, launch: str = commands.LAUNCH) -> tuple[str, Path]:
    """Write the snapshot and hand its script to sbatch; returns the job's id and the snapshot's folder. `launch`: the
    command that trains without Slurm, for the errors' fix."""
    commands.require("sbatch", launch)
    folder = reserve(Path(job.spec.run_dir))
    job = replace(job, spec=replace(job.spec, config=str(folder / job.file_name)))
    try:
        write_snapshot(folder, job.config, job.script, job.file_name)
        answer = commands.call("sbatch", "--parsable", str(folder / BATCH_SCRIPT), launch=launch)
    except LaunchError:
        remove_snapshot(folder)
        raise
    job_id = answer.strip().splitlines()[-1].partition(";")[0]
    (folder / "job_id").write_text(job_id + "\n")
    return job_id, folder


def held_back(job: str) -> str | None:
    """Slurm's reason why a queued job waits; None if it only waits for its turn, or Slurm does not say."""
    try:
        reason = commands.call("squeue", "--noheader", "--format=%r", f"--jobs={job}").strip()
    except LaunchError:
        return None
    return None if not reason or reason in _ITS_TURN else reason


def array_indices(array: str) -> list[int]:
    """The indices of `--array 0-3`, `1,5-9:2` or `0-9%2`, in order."""
    indices: set[int] = set()
    for low, high, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", array.partition("%")[0]):
        indices |= set(range(int(low), int(high or low) + 1, int(step or 1) or 1))
    return sorted(indices)


def array_folders(run_dir: Path, array: str) -> list[Path]:
    """The directories in which an array's tasks train, of those that exist."""
    return [path for index in array_indices(array) if (path := run_dir / f"array_{index}").exists()]


# The batch script of a job and its step's container options, as pure functions.

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
