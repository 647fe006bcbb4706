"""What runs on this machine were predicted to need and then needed: past.jsonl, from which the next plans learn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..files import locked, read_objects, write_whole
from ..hardware import calibration

if TYPE_CHECKING:
    from ..config.schema import RunConfig

SCHEMA = 1
KEPT = 500
"""Newest runs that are kept."""
_WAIT_S = 5.0
_BESIDE = {"run", "logging", "checkpoint", "profile"}
"""Sections that do not change what a step needs."""


def path() -> Path:
    return calibration.cache_dir() / "past.jsonl"


def this_cpu() -> str:
    """The name under which runs on this machine's CPU are kept; runs on GPUs are kept under the card's."""
    return calibration.cpu_name()


def digest(config: RunConfig) -> str:
    """The same for configs whose steps need the same memory."""
    settings = config.model_dump(mode="json", exclude=_BESIDE | {"memory"})
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def note(entry: Mapping[str, Any]) -> None:
    """Add a run. Several jobs may do so at once, and be killed while they do: the file is always a whole one.

    Raises:
        OSError: it cannot be written, or others keep it locked.
    """
    path().parent.mkdir(parents=True, exist_ok=True)
    with locked(path().with_suffix(".lock"), wait_s=_WAIT_S):
        lines = path().read_text(errors="replace").splitlines() if path().exists() else []
        write_whole(path(), "".join(f"{line}\n" for line in [*lines, json.dumps(entry)][-KEPT:]))


def runs(device: str) -> list[dict[str, Any]]:
    """The runs on a device, oldest first; lines that are no records of this schema are left out."""
    return [entry for entry in read_objects(path()) if _is_run(entry) and entry["device"] == device]


def _is_run(entry: Mapping[str, Any]) -> bool:
    if entry.get("schema") != SCHEMA or not isinstance(entry.get("world_size"), int):
        return False
    return "device" in entry and all(isinstance(entry.get(key), dict) for key in ("measured", "predicted"))


def outside(device: str, world_size: int) -> tuple[int, int] | None:
    """(bytes that runs here held on the card beyond torch's allocator, of how many runs): their median.

    Of jobs of one rank, or of several, which have communicators.
    """
    known = [
        int(entry["measured"]["outside"])
        for entry in runs(device)
        if entry["measured"].get("outside") is not None and (entry["world_size"] > 1) == (world_size > 1)
    ]
    return (round(median(known)), len(known)) if known else None


def agreement(device: str) -> str | None:
    """How runs here compare with what was predicted for them, in words."""
    ratios = [
        entry["measured"]["peak"] / entry["predicted"]["peak"] - 1
        for entry in runs(device)
        if entry["measured"].get("peak") and entry["predicted"].get("peak")
    ]
    if not ratios:
        return None
    number = f"{len(ratios)} planned run{'s' if len(ratios) > 1 else ''} here"
    return f"{number} peaked at {min(ratios):+.1%} to {max(ratios):+.1%} of what was predicted"
