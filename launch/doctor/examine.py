"""`shardkit doctor`: looks at this machine for what makes training fail or crawl; each finding comes with its fix."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...errors import ShardkitError

Status = Literal["pass", "warn", "fail"]
_MARKS = {"pass": "ok  ", "warn": "WARN", "fail": "FAIL"}


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        found: what there is, one line.
        fix: what to do about it; empty when it passed.
        data: the numbers, for programs.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def examine(run_dir: Path, cache_dir: Path) -> list[Check]:
    """All checks of this machine, torch's in a process of its own."""
    from . import host

    looks: list[Callable[[], Iterable[Check]]] = [
        host.python,
        host.packages,
        torch_checks,
        host.compiler,
        host.gpu_driver,
        host.gpu_processes,
        host.numa,
        host.memory,
        host.limits,
        host.shared_memory,
        host.network,
        host.rank_variables,
        lambda: host.disk("run directory", run_dir),
        lambda: host.disk("cache directory", cache_dir),
    ]
    return [check for look in looks for check in look()]


def torch_checks(python: str = sys.executable, timeout_s: float = 300) -> list[Check]:
    """What torch and DeepSpeed say about themselves; a crash on import is a finding, not the end."""
    command = [python, "-m", "shardkit.launch.doctor.libraries"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return [Check("torch", "fail", f"did not answer within {timeout_s:g} s", "look for a hanging GPU: nvidia-smi")]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Check("torch", "fail", f"cannot be used: {last}", "reinstall torch for this CUDA: https://pytorch.org")]
    return [Check(**item) for item in json.loads(lines[-1])]


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
    """For programs: `{"status": …, "checks": […], …}`."""
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
