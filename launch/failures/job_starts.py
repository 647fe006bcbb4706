"""The record of every start of a run's jobs, and of their ranks' restarts: RUN_DIR/logs/restarts.jsonl."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files import TAIL, append_lines, read_objects, write_whole

_NO_END = "without a word: its node was lost, or it was killed"


@dataclass(frozen=True)
class Start:
    """One start of a job.

    Attributes:
        restart: how often Slurm had requeued the job.
        step: the run's optimizer step at this start.
        reason: why the start ended; None while it runs, or if it could not record the reason.
        began: local start time in Slurm's format.
    """

    job: str
    restart: int
    step: int
    reason: str | None
    began: str = ""

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
    _append(run_dir, {**event, "reason": _one_line(reason)})


def note_restart(run_dir: Path, reason: str, lost_peer: bool = False) -> None:
    """Record a restart of ranks within a job; `lost_peer`: another node's record of the cause is preferred."""
    event = {"event": "restart", "step": last_step(run_dir), "node": os.uname().nodename, "by": os.getpid()}
    _append(run_dir, {**event, "reason": reason, "lost_peer": lost_peer})


def restarts(run_dir: Path) -> list[tuple[int, str]]:
    """(step, reason) of each restart within jobs; a restart that several nodes recorded counts once."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    seen: Counter[tuple[int, int]] = Counter()
    for event in _events(run_dir, "restart"):
        seen[(event["step"], event["by"])] += 1
        key = (event["step"], seen[(event["step"], event["by"])])
        if key not in found or found[key]["lost_peer"]:
            found[key] = event
    return [(event["step"], event["reason"]) for event in found.values()]


def starts(run_dir: Path) -> list[Start]:
    """Every recorded start, in order."""
    ends = {(e["job"], e["restart"]): e["reason"] for e in _events(run_dir, "end")}
    return [
        Start(e["job"], e["restart"], e["step"], ends.get((e["job"], e["restart"])), e.get("time", "")[:19])
        for e in _events(run_dir, "start")
    ]


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
    """`started 3 times; ended before: 2 x saved after USR2`; None for a run that was never restarted."""
    reasons = [start.ended for start in starts(run_dir)[:-1]] + [reason for _, reason in restarts(run_dir)]
    if not reasons:
        return None
    told = ", ".join(f"{count} x {reason}" for reason, count in Counter(reasons).most_common())
    return f"started {len(reasons) + 1} times; ended before: {told}"


def newest_checkpoint(run_dir: Path) -> tuple[int, int] | None:
    """(step, time of writing in ns) of the newest complete checkpoint; the time tells a rewritten one apart."""
    found = []
    for path in (run_dir / "checkpoints").glob("step_*/manifest.json"):
        step = path.parent.name.removeprefix("step_")
        if step.isdigit():
            with suppress(OSError):  # deleted meanwhile
                found.append((int(step), path.stat().st_mtime_ns))
    return max(found, default=None)


def forget_others(run_dir: Path, job_id: str | None) -> None:
    """Drop the records of other jobs, whose run was deleted."""
    events = read_objects(path(run_dir))
    kept = [event for event in events if job_id is not None and event.get("job") == job_id]
    if kept != events:
        write_whole(path(run_dir), "".join(json.dumps(event) + "\n" for event in kept))


def last_step(run_dir: Path) -> int:
    """The last optimizer step in metrics.jsonl; 0 before the first."""
    last = read_objects(run_dir / "metrics.jsonl", TAIL)
    step = last[-1].get("step") if last else None
    return step if isinstance(step, int) else 0


def _one_line(text: str) -> str:
    return text.partition("\n")[0][:200]


def _append(run_dir: Path, event: dict[str, Any]) -> None:
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **event}) + "\n"
    try:
        path(run_dir).parent.mkdir(parents=True, exist_ok=True)
        append_lines(path(run_dir), [line.encode()])
    except OSError as error:  # a full disk must not end a job over a note
        print(f"cannot write {path(run_dir)}: {error.strerror}", file=sys.stderr, flush=True)
