"""Which job a start belongs to, and which run a directory holds: a restarted job continues where it stopped, whatever
its command line says."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError, LaunchError
from ...files import read_object
from ..failures import exit_codes, failure, job_starts
from ..ranks.env import integer

JOB_ID, RESTARTS = "SHARDKIT_JOB_ID", "SHARDKIT_RESTART_COUNT"
"""The variables that name a job outside of Slurm, and say how often its supervisor has started it again."""
GRACE = "SHARDKIT_GRACE_S"
"""The variable that says how many seconds ranks may take to save and end after SIGTERM or SIGHUP."""
ELASTIC = "SHARDKIT_ELASTIC"
"""The variable of ranks whose job may lose and gain nodes."""
DEFAULT_GRACE_S = 25.0
"""Most schedulers kill after 30 s."""


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this rank's job may lose and gain nodes."""
    return bool(environ.get(ELASTIC))


@dataclass(frozen=True)
class JobStart:
    """One start of a job, as its environment describes it."""

    job: str | None  # the job's name, which is the same at all of its starts; None if nothing identifies the job
    # the torchrun process that starts and restarts these ranks; None without torchrun, or with one per node
    agent: str | None = None
    restart: int = 0  # how often Slurm or another supervisor has started the job again, if it counts
    step: str = ""  # Slurm's number of the step within the job
    attempt: int = 0  # how often torchrun has restarted the ranks
    # whether the user or the manifest named the job, so that each start continues the one before
    is_named: bool = False

    @property
    def name(self) -> str | None:
        """The job's name, else its torchrun's; None for a process by itself."""
        return self.job if self.job is not None or self.agent is None else f"torchrun {self.agent}"


def this_start(environ: Mapping[str, str] = os.environ) -> JobStart:
    """The start that the environment describes.

    The name in SHARDKIT_JOB_ID comes first: it may join several Slurm jobs into one, or name the job of a shell loop.
    The manifests of `shardkit submit --to` set it to the job's UID.
    """
    attempt, started_by = _count(environ, "TORCHELASTIC_RESTART_COUNT"), agent(environ)
    if environ.get(JOB_ID):
        return JobStart(f"job {environ[JOB_ID]}", started_by, _count(environ, RESTARTS), "", attempt, is_named=True)
    if "SLURM_JOB_ID" not in environ:
        return JobStart(None, started_by, attempt=attempt)
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    job = f"Slurm job {environ['SLURM_JOB_ID']}" + (f" of {cluster}" if cluster else "")
    return JobStart(job, started_by, _count(environ, "SLURM_RESTART_COUNT"), environ.get("SLURM_STEP_ID", ""), attempt)


def _count(environ: Mapping[str, str], name: str) -> int:
    return integer(environ, name) if environ.get(name) else 0


def wrote(run_dir: Path, environ: Mapping[str, str] = os.environ) -> bool | None:
    """Whether this start is a restart of the job that wrote the run in `run_dir`; None if nothing tells.

    The run's env.json names the job. It is written after a start has claimed the directory and deleted what it was to
    overwrite, so a job that ended before that does not count as the writer. In an elastic job every start counts as a
    restart, because torchrun does not tell a joining node about earlier starts. A named job is restarted by its name
    alone. In a Slurm job, only its own count or torchrun's shows a restart: users may run a command twice by hand.
    """
    if is_elastic(environ):
        return True
    start, recorded = this_start(environ), read_object(run_dir / "env.json")
    if start.job is None and start.agent is None and start.attempt > 0:
        return True  # torchrun on several nodes, which has restarted its ranks
    if not recorded:
        return False
    if "job" not in recorded:  # written by an earlier version
        return None
    if start.job != recorded["job"]:
        return False
    is_again = start.restart > 0 or start.attempt > 0  # a supervisor or torchrun has counted an earlier start
    if start.is_named or (is_again and (start.job is not None or start.agent == recorded.get("torchrun"))):
        return True
    return None


def overrides(run_dir: str, resume: bool | str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Overrides for a restarted run: continue in its own directory, never delete it.

    A run that starts from another run's checkpoint, and has none of its own yet, starts from there again. Nothing is
    set at a first start, or if the earlier start ended before it claimed the directory: the files there are another
    run's.
    """
    if wrote(Path(run_dir), environ) is not True:
        return []
    has_own = job_starts.newest_checkpoint(Path(run_dir)) is not None
    if isinstance(resume, str) and resume != "auto" and not has_own:
        return ["run.overwrite=true"]
    return ["run.overwrite=false", "run.resume=auto"]


def agent(environ: Mapping[str, str]) -> str | None:
    """The torchrun process that starts and restarts these ranks; None if several nodes have one each."""
    if "TORCHELASTIC_RUN_ID" not in environ or is_elastic(environ) or environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return None
    return f"{os.getppid()} on {os.uname().nodename}"


def grace_s(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds that ranks have to save and end after SIGTERM or SIGHUP."""
    text = environ.get(GRACE)
    if not text:
        return DEFAULT_GRACE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise LaunchError(f"{GRACE}={text} is not a number of seconds", f"set {GRACE} to seconds from 0, or unset it")
    return seconds


def how_to_continue(argv: Sequence[str], overwrites: bool, environ: Mapping[str, str] = os.environ) -> str:
    """The words for a run that saved and stopped: its job's next start continues it, or a command that one can paste.
    `overwrites`: the config says `run.overwrite=true`, which the continuation must not."""
    job = this_start(environ).job
    if job is not None:
        return f"the next start of {job} continues from there"
    command = _command(argv, environ)
    if command is None:
        return "start the same command again with run.resume=true to continue"
    words = [word for word in command if not word.startswith(("run.resume=", "run.overwrite="))]
    words += ["run.overwrite=false"] * overwrites + ["run.resume=true"]
    return f"to continue: {shlex.join(words)}"


def _command(argv: Sequence[str], environ: Mapping[str, str]) -> list[str] | None:
    """The command that started this process or its torchrun; None where a launcher on several nodes did."""
    program = Path(argv[0])
    if program.name == "shardkit" or program.parts[-2:] == ("cli", "__main__.py"):
        return ["shardkit", *argv[1:]]
    if program.parts[-2:] != ("shardkit", "train.py"):  # a program of the user's own, which may take no settings
        return None
    if agent(environ) is None:
        return None if environ.get("WORLD_SIZE", "1") != "1" else ["python", "-m", "shardkit.train", *argv[1:]]
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return None
    if len(words) > 1 and Path(words[1]).name == "torchrun":
        return ["torchrun", *words[2:]]
    return [Path(words[0]).name, *words[1:]]


def stopped(run_dir: str, signal_name: str, environ: Mapping[str, str] = os.environ) -> int:
    """The exit code of a rank that saved and stopped on request; records the stop for the launcher."""
    noted = failure.record_stop(exit_codes.PREEMPTED, signal_name, environ)
    if is_elastic(environ) and signal_name == "SIGTERM":
        # A node has most likely joined. This node's agent may not know yet: only a failure makes it restart its ranks.
        if environ.get("RANK") == "0":
            job_starts.note_restart(Path(run_dir), "saved for SIGTERM: a node joined, or a user ended the job")
        return exit_codes.PREEMPTED
    # The launcher reads the record: torchrun would treat 75 as a failure and end the other ranks.
    return exit_codes.OK if noted else exit_codes.PREEMPTED


# Tells a run directory from a folder of other things, before anything is written there.

MARK = ".shardkit"
"""The folder that marks a run directory as shardkit's."""
_LAUNCHERS = re.compile(r"\..*|logs|checkpoints|submit|plan\.json|array_\d+|lost\+found|.*\.(log|out|err)")
"""Entries that a directory may have before its run begins: launchers and shells write some, and `checkpoints` may be a
link to another disk."""
_MODEL = re.compile(r"config\.json|tokenizer.*\.json|.*\.(safetensors|gguf)|pytorch_model.*")


def has_run(path: Path) -> bool:
    """Whether the directory holds a run: records of steps, or checkpoints. A start that failed before is none."""
    try:
        if (path / "metrics.jsonl").stat().st_size > 0:
            return True
    except OSError:
        pass  # No step was recorded there. Where the folder cannot be read, `run.directory` refuses it by name.
    return any((path / "checkpoints").glob("step_*"))


def refuse_blocked(path: Path) -> None:
    """Check that no file lies where the directory, or a folder above it, has to be."""
    for folder in (path, *path.parents):
        if folder.exists():
            if not folder.is_dir():
                below = "" if folder == path else f" lies below {folder}, which"
                raise ConfigError(f"run.dir={path}{below} is a file", "set run.dir to a directory")
            return


def refuse_without_run(path: Path, resume: bool | str, environ: Mapping[str, str] = os.environ) -> None:
    """Check that a run may begin in a directory that holds none. `run.resume=true` is right at the first start of a
    scheduler's job, which has the same command at every start."""
    refuse_blocked(path)
    entries = foreign_entries(path)
    if entries:
        model_file = next((name for name in entries if _MODEL.fullmatch(name)), None)
        kind = "holds no run and is not empty" if model_file is None else "is a model folder"
        raise ConfigError(
            f"run.dir={path} {kind} ({model_file or entries[0]}{', …' * (len(entries) > 1)}): nothing is written there",
            "set run.dir to a new or an empty directory",
        )
    if resume is not True:
        return
    if this_start(environ).job is None and wrote(path, environ) is not True:
        state = "holds no run: no step was recorded there" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"run.resume=true, but run.dir={path} {state}",
            "correct run.dir, or set run.resume=auto: it continues a run if there is one, and starts one otherwise",
        )


def foreign_entries(path: Path) -> list[str]:
    """The entries of a directory that neither a run nor a launcher made; none in a directory with a run's mark."""
    if (path / MARK).is_dir() or not path.is_dir():
        return []
    names = [name for name in sorted(os.listdir(path)) if not _LAUNCHERS.fullmatch(name)]
    checkpoints = path / "checkpoints"
    if checkpoints.is_dir() and not checkpoints.is_symlink():
        names += [f"checkpoints/{name}" for name in sorted(os.listdir(checkpoints)) if not name.startswith(".")]
    return names
