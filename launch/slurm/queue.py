"""`shardkit jobs`, `logs` and `cancel`: the user's jobs in Slurm."""

from __future__ import annotations

import codecs
import re
import sys
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from ...errors import LONGEST, LaunchError, printable_lines
from ..local.processes import Follower, Sink
from . import commands

_SEPARATOR = "\x1f"  # job names may hold any printable character
_ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STOPPED")
_ITS_TURN = ("None", "Priority", "Resources", "Dependency", "BeginTime", "Licenses", "JobHeldUser", "JobArrayTaskLimit")
_POLL_S, _LOOK_S = 0.2, 1.0


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue, from squeue."""

    job_id: str
    state: str
    elapsed: str
    limit: str
    nodes: str
    reason: str
    run_dir: str


def jobs() -> list[Queued]:
    """This user's shardkit jobs that have not ended.

    Raises:
        LaunchError: Slurm is not installed, or does not answer.
    """
    columns = _SEPARATOR.join(("%i", "%T", "%M", "%l", "%D", "%R", "%k"))
    lines = commands.call("squeue", "--me", "--noheader", f"--format={columns}").splitlines()
    rows = [line.split(_SEPARATOR) for line in lines if line.count(_SEPARATOR) == 6]
    shardkit_rows = [fields for fields in rows if fields[6].partition(" ")[0] == "shardkit"]
    return [Queued(f[0], f[1], f[2], f[3], f[4], f[5], run_dir=f[6].partition(" ")[2]) for f in shardkit_rows]


def table(queued: list[Queued]) -> str:
    """The jobs as aligned lines."""
    if not queued:
        return "no shardkit jobs are queued or running"
    head = ("JOB", "STATE", "TIME", "LIMIT", "NODES", "WHERE OR WHY", "RUN DIRECTORY")
    rows = [head, *((q.job_id, q.state, q.elapsed, q.limit, q.nodes, q.reason, q.run_dir) for q in queued)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def output_of(job: str) -> tuple[str | None, Path]:
    """(job id, its output file), for a job's id or a run directory; the id is None for a directory.

    Raises:
        LaunchError: Slurm does not know the job (any more), or the directory has no job output.
    """
    if not is_job_id(job):
        folder, pattern = Path(job).absolute(), "slurm-*.out"
        if task := re.fullmatch(r"array_(\d+)", folder.name):  # the outputs of an array's tasks lie beside their runs
            folder, pattern = folder.parent, f"slurm-*_{task[1]}.out"
        outputs = [path for path in (folder / "logs").glob(pattern) if path.exists()]
        outputs.sort(key=lambda path: path.stat().st_mtime)
        if not outputs:
            raise LaunchError(
                f"{job} is neither a job id nor a run directory with a job's output", "`shardkit jobs` lists jobs"
            )
        return None, outputs[-1]
    shown = show(job)
    submitted = re.search(r"^\s*Comment=shardkit (.*?) ?$", shown, re.MULTILINE)
    if submitted is not None:  # scontrol garbles a % in a path
        path = Path(submitted[1]) / "logs" / f"slurm-{job}.out"
        if path.parent.is_dir():
            return job, path
    match = re.search(r"^\s*StdOut=(.*)$", shown, re.MULTILINE)
    if match is None or not match[1]:
        raise LaunchError(
            f"Slurm names no output file for job {job}", "it may be interactive; look in its run directory"
        )
    return job, Path(match[1])


def show(job: str) -> str:
    """scontrol's description of a job, one field group per line.

    Raises:
        LaunchError: Slurm does not know the job (any more).
    """
    try:
        return commands.call("scontrol", "show", "job", job)
    except LaunchError as error:
        if "Invalid job id" not in error.cause:
            raise
        raise LaunchError(
            f"Slurm does not know job {job} (any more)",
            "`shardkit jobs` lists jobs; for an old one pass its run directory",
        ) from error


def is_active(job: str) -> bool:
    """Whether the job is queued, running, or about to run again."""
    try:
        states = commands.call("squeue", "--noheader", "--format=%T", f"--jobs={job}").split()
    except LaunchError as error:
        if "Invalid job id" in error.cause:
            return False
        raise
    return any(state in _ACTIVE for state in states)


def held_back(job: str) -> str | None:
    """Slurm's reason why a queued job waits; None if it only waits for its turn, or Slurm does not say."""
    try:
        reason = commands.call("squeue", "--noheader", "--format=%r", f"--jobs={job}").strip()
    except LaunchError:
        return None
    return None if not reason or reason in _ITS_TURN else reason


class _Printable:
    """Writes the output of other programs to a terminal that none of it may control: lines, with the rest escaped."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, text: bytes, /) -> None:
        decoded = self._decoder.decode(text).replace("\r\n", "\n").replace("\r", "\n")  # bars of progress, one a line
        pieces = re.findall(rf"[^\n]{{1,{LONGEST}}}|\n", decoded)  # `printable` shortens longer ones
        self._out.write("".join(piece if piece == "\n" else printable_lines(piece) for piece in pieces).encode())

    def flush(self) -> None:
        self._out.flush()


def show_logs(job: str, follow: bool, out: BinaryIO | None = None) -> None:
    """Print a job's output, control characters escaped; with `follow`, until the job ends, through requeues.

    The lines of an array's tasks have the task's index in front; `JOB_INDEX` shows one task.

    Raises:
        LaunchError: see `output_of`; or the job ended without output.
    """
    sink = _Printable(sys.stdout.buffer if out is None else out)
    folder = array_folder(job) if is_job_id(job) and "_" not in job else None
    if folder is not None:
        _show_array(job, folder, follow, sink)
        return
    job_id, path = output_of(job)
    if path.exists() and not path.is_file():
        raise LaunchError(f"{path} is not a regular file", "remove it: a job's output is a file")
    follower = Follower(path, sink)
    copied = follower.pump()
    if not follow or job_id is None:
        if not path.exists():
            raise LaunchError(f"{path} is not there yet", "the job may be waiting: `shardkit jobs`, or follow with -f")
        return
    next_look = 0.0
    active = True
    while active or copied:
        if time.monotonic() >= next_look:
            next_look, active = time.monotonic() + _LOOK_S, is_active(job_id)
        time.sleep(_POLL_S)
        copied = follower.pump()


def array_folder(job: str) -> Path | None:
    """The folder with the outputs of an array's tasks; None for any other job.

    Raises:
        LaunchError: Slurm does not know the job (any more).
    """
    shown = show(job)
    if not re.search(rf"\bArrayJobId={job}\b", shown):
        return None
    submitted = re.search(r"^\s*Comment=shardkit (.*?) ?$", shown, re.MULTILINE)
    if submitted is not None and (Path(submitted[1]) / "logs").is_dir():
        return Path(submitted[1]) / "logs"
    output = re.search(r"^\s*StdOut=(.*)$", shown, re.MULTILINE)
    return Path(output[1]).parent if output is not None and output[1] else None


def _show_array(job: str, folder: Path, follow: bool, out: Sink) -> None:
    """Print the outputs of all tasks, each line with its task's index in front; with `follow`, until all have ended."""
    tasks: dict[str, Follower] = {}
    buffers: dict[str, BytesIO] = {}
    next_look, active, copied = 0.0, follow, 1
    while active or copied:
        if follow and time.monotonic() >= next_look:
            next_look, active = time.monotonic() + _LOOK_S, is_active(job)
        for path in sorted(folder.glob(f"slurm-{job}_*.out"), key=lambda path: (len(path.name), path.name)):
            index = path.stem.rpartition("_")[2]
            buffer = buffers.setdefault(index, BytesIO())
            tasks.setdefault(index, Follower(path, buffer))
        copied = sum(follower.pump() for follower in tasks.values())
        for index, buffer in buffers.items():
            _print_lines(index, buffer, out, is_last=not active and not copied)
        if follow:
            time.sleep(_POLL_S)
    if not tasks:
        raise LaunchError(f"no task of array {job} has written to {folder}", "they may be waiting: `shardkit jobs`")


def _print_lines(index: str, buffer: BytesIO, out: Sink, is_last: bool) -> None:
    """Move whole lines to `out`; the rest waits for its end, which the last call writes as well."""
    complete, end, remainder = buffer.getvalue().rpartition(b"\n")
    if is_last and remainder:
        complete, end, remainder = buffer.getvalue(), b"\n", b""
    buffer.seek(0)
    buffer.truncate()
    buffer.write(remainder)
    for line in complete.split(b"\n") if end else []:
        out.write(f"{index}: ".encode() + line + b"\n")
    out.flush()


def cancel(job: str) -> str:
    """End a job and its place in the queue; returns what to tell the user.

    Raises:
        LaunchError: Slurm does not know the job, or refuses.
    """
    if not is_job_id(job):
        raise LaunchError(f"{job!r} is not a job id", "`shardkit jobs` lists them")
    shown = show(job)
    commands.call("scancel", job)
    match = re.search(r"^\s*Comment=shardkit (.*?) ?$", shown, re.MULTILINE)
    folder = Path(match[1]) / "checkpoints" if match else None
    note = f"; checkpoints are kept in {folder}" if folder is not None and folder.is_dir() else ""
    return f"job {job} was told to end{note}"


def is_job_id(text: str) -> bool:
    """`12`, `12_3` or `12_[0-3]`."""
    return re.fullmatch(r"\d+(_(\d+|\[[\d,%-]+\]))?", text) is not None
