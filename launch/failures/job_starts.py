"""The record of every start of a run's jobs, and of their ranks' restarts: RUN_DIR/logs/restarts.jsonl."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files import TAIL, append_lines, read_objects, write_whole

IN_USE = "is being written by"
"""The words of the error with which a start is refused because another one writes to the directory."""
BEAT_S = 5.0
_STALE_S = 6 * BEAT_S
_MARK = "in_use"
_NO_END = "without a word: its node was lost, or it was killed"


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    job: str
    restart: int  # how often Slurm had requeued the job
    step: int  # the run's optimizer step at this start
    reason: str | None  # why the start ended; None while it runs, or if it could not record the reason
    began: str = ""  # local start time in Slurm's format
    refused: bool = False  # whether it was refused because another start wrote to the directory

    @property
    def ended(self) -> str:
        """The reason of the end, for a start that has ended."""
        return _NO_END if self.reason is None else self.reason


def path(run_dir: Path) -> Path:
    """The file of the record."""
    return run_dir / "logs" / "restarts.jsonl"


def note_start(run_dir: Path, job_id: str, restart: int, nodes: str, step: int | None = None) -> None:
    """Record that the job starts, on which nodes and at which step; default: the run's, which scripts do not have."""
    step = last_step(run_dir) if step is None else step
    _append(run_dir, {"event": "start", "job": job_id, "restart": restart, "step": step, "nodes": nodes})


def note_end(run_dir: Path, job_id: str, restart: int, reason: str, step: int | None = None) -> None:
    """Record why this start ended."""
    event = {"event": "end", "job": job_id, "restart": restart, "step": last_step(run_dir) if step is None else step}
    _append(run_dir, {**event, "reason": reason.partition("\n")[0][:200], "refused": IN_USE in reason})


def note_restart(run_dir: Path, reason: str, lost_peer: bool = False) -> None:
    """Record a restart of ranks within a job; `lost_peer`: another node's record of the cause is preferred."""
    event = {"event": "restart", "step": last_step(run_dir), "node": os.uname().nodename, "by": os.getpid()}
    _append(run_dir, {**event, "reason": reason, "lost_peer": lost_peer})


def restarts(run_dir: Path) -> list[tuple[int, str]]:
    """(step, reason) of each restart within jobs; a restart that several nodes recorded counts once."""
    by_step: dict[tuple[int, int], dict[str, Any]] = {}
    seen: Counter[tuple[int, int]] = Counter()
    for event in _events(run_dir, "restart"):
        seen[(event["step"], event["by"])] += 1
        key = (event["step"], seen[(event["step"], event["by"])])
        if key not in by_step or by_step[key]["lost_peer"]:
            by_step[key] = event
    return [(event["step"], event["reason"]) for event in by_step.values()]


def starts(run_dir: Path) -> list[Start]:
    """Every recorded start, in order."""
    ends = {(e["job"], e["restart"]): e for e in _events(run_dir, "end")}
    recorded = []
    for event in _events(run_dir, "start"):
        end = ends.get((event["job"], event["restart"]), {})
        refused, began = end.get("refused") is True, event.get("time", "")[:19]
        recorded.append(Start(event["job"], event["restart"], event["step"], end.get("reason"), began, refused))
    return recorded


def history(run_dir: Path, environ: Mapping[str, str] = os.environ) -> tuple[list[Start], list[Start]]:
    """(the starts before the current one, the starts of other jobs that were refused or may still be). The current
    start is the one that the environment names, else the last one that was not refused."""
    current = environ.get("SLURM_JOB_ID"), int(environ.get("SLURM_RESTART_COUNT") or 0)
    rivals, runs = list[Start](), list[Start]()
    for start in starts(run_dir):
        is_waiting = start.reason is None and start.job != current[0] and is_in_use(start_folder(run_dir, start))
        (rivals if start.refused or is_waiting else runs).append(start)
    index = next((i for i, start in enumerate(runs) if (start.job, start.restart) == current), len(runs) - 1)
    return runs[: max(index, 0)], rivals


def start_folder(run_dir: Path, start: Start) -> Path:
    """Where a batch job keeps the logs of one of its starts."""
    return run_dir / "logs" / f"slurm-{start.job}.{start.restart}"


class InUse:
    """Marks a folder of logs as in use until `close`, so that another job's `run.overwrite` leaves it. A file in it is
    touched every few seconds. A process that is killed leaves the file, which then grows old."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / _MARK
        self._next = 0.0

    def beat(self) -> None:
        """Touch the file if that is due; call it often."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + BEAT_S
            with suppress(OSError):  # a full disk, or a folder that is gone
                self._mark.touch()

    def close(self) -> None:
        """The folder is no longer in use."""
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)


def is_in_use(folder: Path) -> bool:
    """Whether a process marks this folder as in use; the age of its mark is measured by the file system's own clock."""
    probe = folder / f".{_MARK}.{os.getpid()}"
    try:
        marked = (folder / _MARK).stat().st_mtime
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:  # no mark
        return False
    return now - marked < _STALE_S


_FIELDS: dict[str, dict[str, type]] = {
    "start": {"job": str, "restart": int, "step": int, "time": str},
    "end": {"job": str, "restart": int, "reason": str},
    "restart": {"step": int, "by": int, "reason": str, "lost_peer": bool},
}


def _events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The valid events of a kind."""
    return [
        event
        for event in read_objects(path(run_dir))
        if event.get("event") == kind and all(isinstance(event.get(k), t) for k, t in _FIELDS[kind].items())
    ]


def summary(run_dir: Path) -> str | None:
    """`started 3 times; ended before: 2 x saved after USR2`; None for a run that was never restarted.

    Jobs that were refused while this run wrote to the directory are no starts of it; they are named after the others,
    and so are jobs that are still starting in it.
    """
    earlier, rivals = history(run_dir)
    reasons = [start.ended for start in earlier] + [reason for _, reason in restarts(run_dir)]
    lines = []
    if reasons:
        counts = ", ".join(f"{count} x {reason}" for reason, count in Counter(reasons).most_common())
        lines.append(f"started {len(reasons) + 1} times; ended before: {counts}")
    for words, is_refused in (
        ("refused, as this run was writing to the directory", True),
        ("starting in the same directory now", False),
    ):
        if jobs := dict.fromkeys(start.job for start in rivals if start.refused is is_refused):
            lines.append(f"{words}: job {', '.join(jobs)}")
    return "; ".join(lines) or None


def newest_checkpoint(run_dir: Path) -> tuple[int, int] | None:
    """(step, time of writing in ns) of the newest complete checkpoint; the time tells a rewritten one apart."""
    checkpoints = []
    for path in (run_dir / "checkpoints").glob("step_*/manifest.json"):
        step = path.parent.name.removeprefix("step_")
        if step.isdecimal():
            with suppress(OSError):  # deleted meanwhile
                checkpoints.append((int(step), path.stat().st_mtime_ns))
    return max(checkpoints, default=None)


def forget_others(run_dir: Path, job_id: str | None) -> None:
    """Drop the records of other jobs, whose run was deleted; a job that runs right now has its own to keep."""
    events = read_objects(path(run_dir))
    running = {start.job for start in starts(run_dir) if is_in_use(start_folder(run_dir, start))}
    retained = [event for event in events if event.get("job") in {job_id, *running} - {None}]
    if retained != events:
        write_whole(path(run_dir), "".join(json.dumps(event) + "\n" for event in retained))


def last_step(run_dir: Path) -> int:
    """The last optimizer step in metrics.jsonl; 0 before the first."""
    rows = read_objects(run_dir / "metrics.jsonl", TAIL)
    step = rows[-1].get("step") if rows else None
    return step if isinstance(step, int) else 0


def _append(run_dir: Path, event: dict[str, Any]) -> None:
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **event}) + "\n"
    try:
        path(run_dir).parent.mkdir(parents=True, exist_ok=True)
        append_lines(path(run_dir), [line.encode()])
    except OSError as error:  # a full disk must not end a job over a note
        print(f"cannot write {path(run_dir)}: {error.strerror}", file=sys.stderr, flush=True)
