"""A finding of `shardkit doctor`, with its fix; findings as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...errors import ShardkitError

Status = Literal["pass", "warn", "fail"]
_MARKS = {"pass": "ok  ", "warn": "WARN", "fail": "FAIL"}


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        found: the state found, in one line.
        fix: how to correct it; empty if the check passed.
        data: the figures, for programs.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def warning(name: str, is_bad: bool, found: str, fix: str, data: dict[str, Any] | None = None) -> Check:
    """A check that warns, with its fix, if the state is bad, and passes otherwise."""
    return Check(name, "warn" if is_bad else "pass", found, fix if is_bad else "", data or {})


def render(checks: list[Check]) -> str:
    """One line per finding, its fix below."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.status]}  {check.name.ljust(width)}  {check.found}")
        if check.fix:
            lines.append(f"{' ' * (width + 8)}fix: {check.fix}")
    counts = {status: sum(check.status == status for check in checks) for status in _MARKS}
    lines.append(f"{counts['pass']} ok, {counts['warn']} warnings, {counts['fail']} failures")
    return "\n".join(lines)


def as_json(checks: list[Check], extra: dict[str, Any]) -> str:
    """JSON for programs: `{"status": …, "checks": […], …}`."""
    return json.dumps({"status": worst(checks), "checks": [asdict(check) for check in checks], **extra}, indent=1)


def worst(checks: list[Check]) -> Status:
    """The most severe status."""
    order: tuple[Status, ...] = ("fail", "warn")
    for status in order:
        if any(check.status == status for check in checks):
            return status
    return "pass"


def from_error(name: str, error: ShardkitError) -> Check:
    """An error that the user can correct, as a finding."""
    return Check(name, "fail", error.cause, error.fix)
