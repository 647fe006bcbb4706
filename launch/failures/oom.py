"""Post-mortems in RUN_DIR/oom of ranks that ran out of memory, for the report at the end of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import gib
from ...files import parse_json, read_regular
from . import exit_codes
from .failure import Failure

FOLDER = "oom"
_BEST = 3
_SCHEMA = 1


def read(run_dir: Path, since: float) -> dict[int, dict[str, Any]]:
    """Rank → post-mortem, if written after `since` (seconds since the epoch): earlier attempts left older ones."""
    post_mortems: dict[int, dict[str, Any]] = {}
    for path in (run_dir / FOLDER).glob("rank*.json"):
        try:
            record = parse_json(read_regular(path))
            if record["schema"] == _SCHEMA and record["time"] >= since:
                post_mortems[int(record["rank"])] = {**record, "path": str(path)}
        except (OSError, ValueError, KeyError, TypeError):  # cut short by a full disk, or not ours
            continue
    return post_mortems


def words(failures: Iterable[Failure], post_mortems: Mapping[int, Mapping[str, Any]]) -> dict[int, list[str]]:
    """Rank → lines about its memory, for ranks that ran out of it or were killed when the host almost had."""
    lines: dict[int, list[str]] = {}
    for failure in failures:
        record = post_mortems.get(failure.rank)
        if failure.exit_code == exit_codes.OUT_OF_MEMORY and record is not None and record["kind"] != "host-risk":
            lines[failure.rank] = [*_changes(record), f"  post-mortem: {record['path']}"]
        signum = exit_codes.signal_of(failure.exit_code)
        if signum is not None and signum.name == "SIGKILL":
            # Any rank of the host may have noticed; the rank's own record counts first.
            near = record or next((r for r in post_mortems.values() if r["kind"] == "host-risk"), None)
            if near is not None and near["kind"] == "host-risk":
                lines[failure.rank] = [_pressure(near), *_changes(near), f"  post-mortem: {near['path']}"]
    return lines


def _pressure(record: Mapping[str, Any]) -> str:
    memory, row = record["memory"], record["row"]["host_mem"]
    used = memory["limit"] - memory["free"]
    workers = f", its loader processes {gib(row['children_rss'], 1)}" if row["children_rss"] else ""
    return (
        f"  the host's memory was almost used up at step {record['step']}: {gib(used, 1)} of "
        f"{gib(memory['limit'], 1)} on {record['host']}; rank {record['rank']} held {gib(row['rss'], 1)}{workers}"
    )


def _changes(record: Mapping[str, Any]) -> list[str]:
    """The best changes, one line each; a change that would not have been enough says so."""
    best = record["advice"][:_BEST]
    if not best:
        return []
    missing = record["memory"]["missing"] or 0
    width = max(len(change["change"]) for change in best)
    return ["  what would help, and what it costs:"] + [_change(change, width, missing) for change in best]


def _change(change: Mapping[str, Any], width: int, missing: int) -> str:
    saving = change["saving_bytes"]
    amount = "saves memory" if saving is None else f"saves {gib(saving, 1)}"
    short = " (not enough alone)" if saving is not None and saving < missing else ""
    return f"    {change['change']:<{width}}  {amount}{short}: {change['cost']}"
