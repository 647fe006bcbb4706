"""The run directory: claim it for one writer, and record the run's settings before its first step."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from ..checkpoint.native import layout
from ..config.load import LoadedConfig, load_config
from ..errors import ConfigError, ShardkitError, gib
from ..files import open_regular, read_git, read_object, write_whole
from ..launch.failures import job_starts
from ..launch.local import rendezvous, restart
from . import owner
from .owner import Owner

# The names that a run writes, in the run directory and in its folders. Nothing else there is ever deleted.
FILES = (
    "report.html", "compare.html", "memory.jsonl", "env.json", "samples.jsonl", "metrics.jsonl", "experts.json",
    "config.yaml",
)  # fmt: skip
_PLAN = "plan.json"
FOLDERS = {
    "checkpoints": r"latest|step_\d{8,}(\.\w+)?",
    "tensorboard": r"events\.out\.tfevents\..*",
    "wandb": r"run_id|latest-run|debug.*\.log|(offline-)?run-.*",
    "profile": r"rank\d+_.*",
    "trace": r"rank\d+\.json",
    "oom": r"rank\d+(_snapshot)?\.(json|pickle)",
    "logs": r"(config|env)\.\d+\.(yaml|json)|(restarts|checkpoints)\.jsonl|dtypes\.json|prometheus\.txt|hang"
    r"|nccl_rank_\d+|slurm-\d.*|\d{8}-\d{6}-node\d+-\d+",
}
_DRAFT = re.compile(r".*\.part[0-9a-f]{12}")  # left by a process that was killed while writing


class Ranks(Protocol):
    """The ranks that share a run directory."""

    @property
    def is_main(self) -> bool: ...

    def gather(self, value: object) -> list[object]:
        """Every rank's value, on every rank."""
        ...


def check(loaded: LoadedConfig, world: Ranks) -> None:
    """Check, before data are read, that `run.dir` may become this run's; writes nothing. Collective."""
    path = Path(loaded.config.run.dir)
    on_main(world, path, lambda: _refuse(path, loaded, exclusive=True))


def prepare(loaded: LoadedConfig, world: Ranks, exclusive: bool = True) -> tuple[Path, Owner | None]:
    """Claim `run.dir` for this run. Collective: every rank stops if rank 0 may not write.

    `exclusive`: refuse a directory that holds other things than a run; False where another tool trains and may use the
    directory too. Returns the directory, and on rank 0 its `Owner`, which the caller must close.
    """
    path, claimed = Path(loaded.config.run.dir), list[Owner]()
    files_in_use = [str(names) for names in world.gather(os.environ.get("SHARDKIT_KEEP", ""))]  # each node has its own
    try:
        on_main(world, path, lambda: claimed.append(_claim(path, loaded, files_in_use, exclusive)))
    except BaseException:
        for claimed_owner in claimed:
            claimed_owner.close()
        raise
    return path, claimed[0] if claimed else None


def on_main(world: Ranks, path: Path, action: Callable[[], None]) -> None:
    """Run `action`, which writes to the directory, on rank 0; its errors are raised on every rank."""
    problem: ShardkitError | None = None
    if world.is_main:
        try:
            action()
        except ShardkitError as error:
            problem = error
        except OSError as error:
            cause = f"run.dir={path} cannot be written: {error.strerror}"
            problem = ConfigError(cause, "set run.dir to a directory you can write")
    for raised in world.gather(problem):
        if isinstance(raised, ShardkitError):
            raise raised


def _claim(path: Path, loaded: LoadedConfig, files_in_use: Sequence[str], exclusive: bool) -> Owner:
    _refuse(path, loaded, exclusive)
    claimed = owner.claim(path)
    try:
        _refuse(path, loaded, exclusive)  # the previous owner may have left a run
        if loaded.config.run.overwrite:
            _refuse_to_lose(path, loaded)
            _clear(path, files_in_use)
        elif not restart.has_run(path):
            _rewind(path, 0)  # a start that failed before its first step may have left empty files
        rendezvous.sweep(path)
        for folder in (path / "logs", path / "checkpoints"):  # either may be a link to another disk
            if folder.is_symlink() and not folder.is_dir():
                target = os.readlink(folder)
                cause = f"{folder} is a link to {target}, which is no directory"
                raise ConfigError(cause, "make that directory, or remove it")
            folder.mkdir(exist_ok=True)
        if loaded.config.run.resume is False:  # a resume writes them once it has found its checkpoint
            _write_settings(path, loaded)
    except BaseException:
        claimed.close()
        raise
    return claimed


def _refuse(path: Path, loaded: LoadedConfig, exclusive: bool) -> None:
    """Raise if the directory's contents forbid this run."""
    run = loaded.config.run
    restart.refuse_blocked(path)
    nearest = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run.dir={path} cannot be written: no permission to write in {nearest}",
            "set run.dir to a directory you can write",
        )
    if not restart.has_run(path):
        if exclusive:
            restart.refuse_without_run(path, run.resume)
        return
    run_files = ["metrics.jsonl"] * (path / "metrics.jsonl").exists()
    run_files += ["checkpoints"] * any((path / "checkpoints").glob("step_*"))
    is_ours = (path / owner.FOLDER).is_dir()
    if run.overwrite and not is_ours:
        raise ConfigError(
            f"run.dir={path} holds {run_files[0]}, but no {owner.FOLDER}/, which every run makes: it is not deleted",
            "set another run.dir; delete a run of an earlier version of shardkit by hand",
        )
    if run.overwrite:
        link = path / "checkpoints"
        if link.is_symlink() and "checkpoints" in run_files:
            raise ConfigError(
                f"{link} is a link to {link.resolve()}: run.overwrite deletes nothing behind links",
                "delete the checkpoints there by hand, or the link, or set another run.dir",
            )
    elif not (run.continues or (run.source and Path(run.source).resolve().is_relative_to(path.resolve()))):
        raise ConfigError(
            f"run.dir={path} already holds a run ({run_files[0]})",
            f"set run.resume=true to continue it, {'run.overwrite=true to delete it, ' * is_ours}or another run.dir",
        )


def _refuse_to_lose(path: Path, loaded: LoadedConfig) -> None:
    """Raise if `run.overwrite` would delete checkpoints that this job made, or may have made.

    Where nothing identifies the job, an unfinished run of the same config counts as its own: a supervisor may have
    started the command again. Checkpoints of other jobs are deleted, with a warning.
    """
    newest = job_starts.newest_checkpoint(path)
    if newest is None:
        return
    is_own, step = restart.wrote(path), newest[0]
    if is_own:
        raise ConfigError(
            f"run.overwrite=true would delete the checkpoints of this job's earlier start in run.dir={path} (up to "
            f"step {step})",
            "set run.resume=true in place of run.overwrite to continue",
        )
    if is_own is None and step < _last_step(path, loaded) and _has_config(path, loaded):
        raise ConfigError(
            f"run.dir={path} holds an unfinished run of this same config with checkpoints up to step {step}, and "
            "nothing says whether run.overwrite=true came from a user or from a supervisor that starts this again",
            f"set run.resume=true to continue, or delete {path} to start anew; under a supervisor name the job by "
            f"{restart.JOB_ID}, then its restarts continue",
        )
    warning = f"run.overwrite deletes the run in {path}, with checkpoints up to step {step}"
    print(warning, file=sys.stderr, flush=True)


def _has_config(path: Path, loaded: LoadedConfig) -> bool:
    """Whether the run in `path` has this config, apart from the keys that say how to treat the directory."""
    try:
        earlier = load_config(path / "config.yaml").config
    except ConfigError:  # written by another version
        return False
    earlier_values, values = earlier.model_dump(), loaded.config.model_dump()
    for key in ("resume", "overwrite"):
        earlier_values["run"].pop(key)
        values["run"].pop(key)
    return earlier_values == values


def _write_settings(path: Path, loaded: LoadedConfig) -> None:
    write_config(path, loaded)
    write_whole(path / "env.json", json.dumps(environment(), indent=1) + "\n")


def write_config(path: Path, loaded: LoadedConfig) -> None:
    """Write the resolved config, with the origin of each value, to `config.yaml`."""
    write_whole(path / "config.yaml", loaded.render())


def note_last_step(world: Ranks, path: Path, step: int) -> None:
    """Record the run's last step in env.json, for a run whose length depends on its data; collective."""

    def change() -> None:
        file = path / "env.json"
        write_whole(file, json.dumps({**json.loads(file.read_text()), "last_step": step}, indent=1) + "\n")

    on_main(world, path, change)


def _last_step(path: Path, loaded: LoadedConfig) -> int:
    """The step at which the run in `path`, which has this config, was to end."""
    step = read_object(path / "env.json").get("last_step")
    return step if isinstance(step, int) else loaded.config.train.max_steps


def go_on(loaded: LoadedConfig, world: Ranks, path: Path, step: int) -> None:
    """Prepare the directory for a run resumed after `step`: new settings, and later records dropped; collective."""

    def change() -> None:
        _write_settings(path, loaded)
        _rewind(path, step)

    on_main(world, path, change)


def _rewind(path: Path, step: int) -> None:
    """Drop records after `step`, and a last line that was cut short."""
    for name in ("metrics.jsonl", "memory.jsonl", "samples.jsonl"):
        file = path / name
        if not file.exists():
            continue
        with open_regular(file) as stream:
            lines = stream.readlines()
        retained_lines = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
        if retained_lines != lines:
            write_whole(file, b"".join(retained_lines))
    if step == 0:  # else TensorBoard itself is told which steps to purge
        _clear_folder(path, "tensorboard")


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _clear(path: Path, files_in_use: Sequence[str]) -> None:
    """Delete only files that a run wrote; the settings come last, since until then the directory counts as a run."""
    files_in_use = [*files_in_use, *map(str, _of_rivals(path))]
    foreign_entries = [entry for name in FOLDERS for entry in _clear_folder(path, name, files_in_use)]
    job_starts.forget_others(path, os.environ.get("SLURM_JOB_ID"))
    for name in FILES:
        (path / name).unlink(missing_ok=True)
    if foreign_entries:
        names = [str(entry.relative_to(path)) for entry in foreign_entries]
        shown = ", ".join(names[:5]) + ", …" * (len(names) > 5)
        print(f"run.overwrite keeps files in {path} that no run wrote: {shown}", file=sys.stderr, flush=True)


def _of_rivals(path: Path) -> list[Path]:
    """The logs of jobs that run now. A job that started at the same time is refused soon, and its log says so."""
    logs = path.absolute() / "logs"
    running = [folder for folder in logs.glob("*") if folder.is_dir() and job_starts.is_in_use(folder)]
    jobs = {match[1] for folder in running if (match := re.fullmatch(r"slurm-(\w+)\.\d+", folder.name))}
    outputs = [file for job in jobs for file in logs.glob(f"slurm-{job}.*")]
    return [*running, *outputs, *([job_starts.path(path).absolute()] if jobs else [])]


def _clear_folder(path: Path, name: str, files_in_use: Sequence[str] = ()) -> list[Path]:
    """Delete a run's files in one of its folders, and the folder once it is empty; returns the entries left.

    A link is deleted, never followed. `files_in_use`: absolute paths that launchers write to, as in each rank's
    SHARDKIT_KEEP. They stay.
    """
    folder = path / name
    retained_files = [Path(entry).resolve() for names in files_in_use for entry in names.split(os.pathsep) if entry]
    if folder.is_symlink():
        # Checkpoints may lie on another disk, and the next run's belong there too: keep that link.
        if name != "checkpoints" and not any(file.is_relative_to(folder.resolve()) for file in retained_files):
            folder.unlink()
        return []
    if not folder.is_dir():
        return []
    pattern, foreign_entries = re.compile(FOLDERS[name]), []
    for entry in sorted(folder.iterdir()):
        target = folder.resolve() / entry.name
        if any(file.is_relative_to(target) for file in retained_files):
            continue
        if not pattern.fullmatch(entry.name) and not _DRAFT.fullmatch(entry.name):
            foreign_entries.append(entry)
        elif entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        elif layout.step_of(entry) is not None:  # renamed first: a crash must not leave half of one
            layout.remove(entry)
        else:
            shutil.rmtree(entry)
    with suppress(OSError):  # not empty
        folder.rmdir()
    return foreign_entries


def listed(path: Path) -> str:
    """List the run's files on one line: top-level files, and each folder with the number and size of its files.

    Other files of the user in the same directory are left out.
    """
    parts = []
    for entry in sorted(entry for entry in path.iterdir() if entry.name in {*FILES, *FOLDERS, _PLAN}):
        inside = [p.stat().st_size for p in entry.rglob("*") if p.is_file()] if entry.is_dir() else []
        files = f"{len(inside)} file{'s' * (len(inside) > 1)}"
        parts += [f"{entry.name}/ ({files}, {gib(sum(inside))})"] if inside else []
        parts += [entry.name] if entry.is_file() else []
    return f"{path}: {', '.join(parts)}"


def environment() -> dict[str, Any]:
    """Versions, hardware, command line and commit, for repeating the run; and the job, by which a restart knows it."""
    start = restart.this_start()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "job": start.job,
        "torchrun": start.agent,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: _version(name) for name in ("shardkit", "torch", "deepspeed", "accelerate", "numpy", "pydantic")
        },
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count() or 1,
        "git_commit": read_git("rev-parse", "HEAD"),
        "git_dirty": bool(read_git("status", "--porcelain", "--untracked-files=no")),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
