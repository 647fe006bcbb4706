"""Shared by every benchmark: its environment, an honest interval, a place for the result."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil
from jinja2 import UndefinedError

from shardkit.files import write_whole

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "benchmarks" / "results"
LONGEST_LINE = 4000
FEWEST = 6
"""Samples that an interval of 95 % needs."""
Arm = TypeVar("Arm", bound=Hashable)
Sample = TypeVar("Sample")


def median_ci(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(median, low, high): the median with its distribution-free confidence interval.

    The interval runs from the k-th smallest to the k-th largest sample, with the largest k whose coverage
    1 - 2 P(B < k), B ~ Binomial(n, 1/2), is at least `confidence` (David & Nagaraja, Order Statistics, section 7.1).

    Raises:
        ValueError: too few samples for any such interval (fewer than 6 at 95 %).
    """
    ordered = sorted(samples)
    n = len(ordered)
    k, below = 0, 0  # below = 2^n P(B < k)
    while k < n // 2 and 1 - 2 * (below + comb(n, k)) / 2**n >= confidence:
        below += comb(n, k)
        k += 1
    if k == 0:
        raise ValueError(f"{n} samples are too few for a {confidence:.0%} interval of the median")
    return median(ordered), ordered[k - 1], ordered[n - k]


def paired_ratio(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of ours / theirs over samples that were neighbours in time."""
    return median_ci([a / b for a, b in zip(ours, others, strict=True)])


def rotated(arms: Sequence[Arm], index: int) -> list[Arm]:
    """The arms in rotated order: each goes first in turn."""
    start = index % len(arms)
    return [*arms[start:], *arms[:start]]


def in_turns(arms: Mapping[Arm, Callable[[], Sample]], rounds: int, warmup: int = 0) -> dict[Arm, list[Sample]]:
    """Call every arm once a round, so that neighbours in time can be compared; another arm goes first in each round.

    Args:
        warmup: rounds before those that count.
    """
    taken: dict[Arm, list[Sample]] = {arm: [] for arm in arms}
    for index in range(warmup + rounds):
        for arm in rotated(list(arms), index):
            taken[arm].append(arms[arm]())
    return {arm: samples[warmup:] for arm, samples in taken.items()}


def environ(**more: str) -> dict[str, str]:
    """This process's variables, by which other processes find this checkout and the tools beside this interpreter."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    python = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PATH": path, "PYTHONPATH": python, **more}


def output_of(argv: Sequence[str], limit_s: float, **how: Any) -> tuple[int | None, str]:
    """Exit code and output of a command; no code if it takes longer. It then ends with all that it has started.

    Args:
        how: arguments of `subprocess.Popen`.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **how)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        return code, output.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    for relative in (*parent.children(recursive=True), parent):
        with suppress(psutil.NoSuchProcess):
            relative.kill()
    process.wait()


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and date, to record with a figure."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "deepspeed": _version("deepspeed"),
        "shardkit": _shardkit_version(),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_result(name: str, payload: Mapping[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json: the payload with `environment` beside it."""
    return write_json(RESULTS / f"{name}.json", {"environment": environment(), **payload})


def publish(name: str, payload: Mapping[str, Any], section: str | None = None) -> None:
    """Write a result, and print what the page will say of it.

    Args:
        section: of page.md; it has the name of the result if this is None.
    """
    path = write_result(name, payload)
    try:
        from .report import rendered

        print(rendered(section or name, json.loads(path.read_text())))
    except (UndefinedError, ImportError) as error:  # parts are not measured yet, or the checkout changed meanwhile
        print(f"not rendered: {error}")
    print(f"written: {path}", flush=True)


def measure_each(
    name: str, group: str, chosen: Iterable[str], measure: Callable[[str], Any], is_resumed: bool = False, **about: Any
) -> None:
    """Measure each of the chosen arms, and publish it at once beside those that were measured before.

    Args:
        group: the key of the result that has the arms.
        is_resumed: leave out what this commit has measured.
        about: the other keys of the result.
    """
    for arm in unmeasured(list(chosen), earlier(name).get(group, {})) if is_resumed else chosen:
        figures = measure(arm)
        publish(name, {**about, group: {**earlier(name).get(group, {}), arm: figures}})


def write_json(path: Path, payload: Mapping[str, Any]) -> Path:
    """Create or replace a file of results, one case a line, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, one_case_a_line(payload) + "\n")
    return path


def one_case_a_line(node: Any, depth: int = 0) -> str:
    """JSON with a line for each key of the file, for each case of a group of cases, and for each series of numbers.

    A group is an object or a list that holds only objects. A case of more than `LONGEST_LINE` characters is split into
    its own keys; a series is never split.
    """
    flat = json.dumps(node)
    if not isinstance(node, (dict, list)):
        return flat
    children = list(node.values() if isinstance(node, dict) else node)
    is_group = depth == 1 and len(children) > 1 and all(isinstance(child, dict) for child in children)
    is_long = len(flat) > LONGEST_LINE and "{" in flat
    if not (children and (depth == 0 or is_group or is_long)):
        return flat
    names = [f"{json.dumps(key)}: " for key in node] if isinstance(node, dict) else [""] * len(children)
    lines = (" " * (depth + 1) + name + one_case_a_line(c, depth + 1) for name, c in zip(names, children, strict=True))
    opening, closing = "{}" if isinstance(node, dict) else "[]"
    return f"{opening}\n" + ",\n".join(lines) + f"\n{' ' * depth}{closing}"


def earlier(name: str) -> dict[str, Any]:
    """The file of results that NAME wrote before, since parts can be measured one at a time; empty without one."""
    path = RESULTS / f"{name}.json"
    held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return held


def unmeasured(engines: Sequence[str], measured: Mapping[str, Any]) -> list[str]:
    """The engines without a result of this commit: where an interrupted measurement goes on."""
    commit = _commit()
    return [engine for engine in engines if measured.get(engine, {}).get("measured", {}).get("commit") != commit]


def stamp() -> dict[str, Any]:
    """Commit and date, to record with one of several figures in a file."""
    return {key: environment()[key] for key in ("commit", "date")}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _shardkit_version() -> str:
    import shardkit

    return shardkit.__version__


def _commit() -> str | None:
    """HEAD of this checkout, `+` appended when tracked files differ from it; None outside of git."""
    if shutil.which("git") is None:
        return None
    head = subprocess.run(["git", "rev-parse", "--verify", "-q", "HEAD"], cwd=REPO, capture_output=True, text=True)
    if head.returncode:
        return None
    # Results of the same session do not make the code that was measured a different one.
    changed = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"]
    dirty = subprocess.run(changed, cwd=REPO, capture_output=True, text=True).stdout
    return head.stdout.strip() + ("+" if dirty else "")
