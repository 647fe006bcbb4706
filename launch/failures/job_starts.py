"""The record of every start of a run's jobs, and of their ranks' restarts: RUN_DIR/logs/restarts.jsonl."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NO_END = "without a word: its node was lost, or it was killed"


@dataclass(frozen=True)
class Start:
    """One start of a job.

    Attributes:
        restart: how often Slurm queued the job again before.
        step: the optimizer step that the run stood at.
        reason: why it ended; None while it runs, or if it could not say.
    """

    job: str
    restart: int
    step: int
    reason: str | None

    @property
    def ended(self) -> str:
        """Why it ended, for one that has."""
        return _NO_END if self.reason is None else self.reason


def path(run_dir: Path) -> Path:
    """The file."""
    return run_dir / "logs" / "restarts.jsonl"


def note_start(run_dir: Path, job_id: str, restart: int, nodes: str) -> None:
    """Record that the job starts, where, and the step it stands at."""
    _append(run_dir, {"event": "start", "job": job_id, "restart": restart, "step": last_step(run_dir), "nodes": nodes})


def note_end(run_dir: Path, job_id: str, restart: int, reason: str) -> None:
    """Record why this start ended."""
    event = {"event": "end", "job": job_id, "restart": restart, "step": last_step(run_dir)}
    _append(run_dir, {**event, "reason": _one_line(reason)})


def note_restart(run_dir: Path, reason: str, lost_peer: bool = False) -> None:
    """Record that ranks are started again within a job; `lost_peer`: the cause is on another node, if one says so."""
    event = {"event": "restart", "step": last_step(run_dir), "node": os.uname().nodename, "by": os.getpid()}
    _append(run_dir, {**event, "reason": reason, "lost_peer": lost_peer})


def restarts(run_dir: Path) -> list[tuple[int, str]]:
    """(step, reason) of each restart within jobs; what several nodes saw of one restart counts once."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    seen: Counter[tuple[int, int]] = Counter()
    for event in (parsed(line) for line in _lines(path(run_dir))):
        if event.get("event") != "restart":
            continue
        seen[(event["step"], event["by"])] += 1
        key = (event["step"], seen[(event["step"], event["by"])])
        if key not in found or found[key]["lost_peer"]:
            found[key] = event
    return [(event["step"], event["reason"]) for event in found.values()]


def starts(run_dir: Path) -> list[Start]:
    """Every recorded start, in order."""
    events = [event for line in _lines(path(run_dir)) if (event := parsed(line))]
    ends = {(e.get("job"), e.get("restart")): e.get("reason") for e in events if e.get("event") == "end"}
    return [
        Start(e["job"], e["restart"], e["step"], ends.get((e["job"], e["restart"])))
        for e in events
        if e.get("event") == "start"
    ]


def summary(run_dir: Path) -> str | None:
    """`started 3 times; ended before: 2 x saved after USR2`; None for a run that was never started again."""
    reasons = [start.ended for start in starts(run_dir)[:-1]] + [reason for _, reason in restarts(run_dir)]
    if not reasons:
        return None
    told = ", ".join(f"{count} x {reason}" for reason, count in Counter(reasons).most_common())
    return f"started {len(reasons) + 1} times; ended before: {told}"


def last_step(run_dir: Path) -> int:
    """The last optimizer step in metrics.jsonl; 0 before the first."""
    last = tail(run_dir / "metrics.jsonl")
    return int(last[-1]["step"]) if last and "step" in last[-1] else 0


def tail(file: Path, n_bytes: int = 65536) -> list[dict[str, Any]]:
    """The objects on the last whole lines of a file; none where there is no file."""
    try:
        with file.open("rb") as opened:
            opened.seek(0, 2)
            start = max(0, opened.tell() - n_bytes)
            opened.seek(start)
            lines = opened.read().splitlines()
    except OSError:
        return []
    return [found for line in lines[1 if start else 0 :] if (found := parsed(line))]


def _one_line(text: str) -> str:
    return text.partition("\n")[0][:200]


def parsed(line: str | bytes) -> dict[str, Any]:
    """The object on a line; empty for one that a kill cut short."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _append(run_dir: Path, event: dict[str, Any]) -> None:
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **event})
    try:
        path(run_dir).parent.mkdir(parents=True, exist_ok=True)
        with path(run_dir).open("a") as file:
            file.write(line + "\n")
    except OSError as error:  # a full disk must not end a job that only wanted to note something
        print(f"cannot write {path(run_dir)}: {error.strerror}", file=sys.stderr, flush=True)
