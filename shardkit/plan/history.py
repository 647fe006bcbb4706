"""Predicted and measured memory of this machine's past runs (past.jsonl), from which later plans learn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..files import cache_dir, locked, read_objects, write_whole

if TYPE_CHECKING:
    from ..config.schema import RunConfig

SCHEMA = 1
MOST_ROWS = 500
"""How many of the newest runs the file keeps."""
_WAIT_S = 5.0
_BESIDE = {"run", "logging", "checkpoint", "profile"}
"""Config sections that do not change a step's memory."""


def path() -> Path:
    return cache_dir() / "past.jsonl"


def digest(config: RunConfig) -> str:
    """A hash that is equal for configs whose steps need the same memory."""
    settings = config.model_dump(mode="json", exclude=_BESIDE | {"memory"})
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def note(entry: Mapping[str, Any]) -> None:
    """Add a run. The file stays whole even if several jobs write at once or are killed while writing."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with locked(path().with_suffix(".lock"), wait_s=_WAIT_S):
        lines = path().read_text(errors="replace").splitlines() if path().exists() else []
        write_whole(path(), "".join(f"{line}\n" for line in [*lines, json.dumps(entry)][-MOST_ROWS:]))


def runs(device: str) -> list[dict[str, Any]]:
    """The runs on a device, oldest first; lines that are not records of this schema are skipped."""
    return [
        entry for entry in read_objects(path())
        if entry.get("schema") == SCHEMA and isinstance(entry.get("world_size"), int) and entry.get("device") == device
        and all(isinstance(entry.get(key), dict) for key in ("measured", "predicted"))
    ]  # fmt: skip


def outside(device: str, world_size: int) -> tuple[int, int] | None:
    """(median bytes that runs here held on the card outside torch's allocator, number of those runs).

    Only runs with one rank are compared with each other, and only runs with several: those have communicators.
    """
    outside_bytes = [
        int(entry["measured"]["outside"])
        for entry in runs(device)
        if entry["measured"].get("outside") is not None and (entry["world_size"] > 1) == (world_size > 1)
    ]
    return (round(median(outside_bytes)), len(outside_bytes)) if outside_bytes else None


def agreement(device: str) -> str | None:
    """One sentence that compares this device's runs with their predictions; None without any."""
    ratios = [
        entry["measured"]["peak"] / entry["predicted"]["peak"] - 1
        for entry in runs(device)
        if entry["measured"].get("peak") and entry["predicted"].get("peak")
    ]
    if not ratios:
        return None
    number = f"{len(ratios)} planned run{'s' if len(ratios) > 1 else ''} here"
    return f"{number} peaked {min(ratios):+.1%} to {max(ratios):+.1%} from the prediction"
