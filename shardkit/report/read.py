"""Read a run directory's files as typed data; missing, torn or foreign files are noted and never fatal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..config.yaml import read_yaml
from ..errors import ConfigError, DataError
from ..files import open_regular, parse_json, parsed, read_regular
from ..launch.failures import failure, job_starts
from ..memory.rows import READABLE, RankRow
from ..telemetry.metrics import targets_called

PROFILED = ("_tables.txt", "_trace.json.gz", "_snapshot.pickle", "_memory.html", "_summary.json")
"""Ends of the names of the profiler's files; the last two are of runs up to 0.2."""

ROWS = 40_000
"""About this many rows of `memory.jsonl` are read at most."""


@dataclass(frozen=True)
class Gather:
    """Every rank's memory after one optimizer step; `time` in seconds since the epoch."""

    step: int
    time: float
    rows: list[RankRow]


@dataclass(frozen=True)
class Run:
    """The contents of a run directory."""

    path: Path
    config: dict[str, Any]  # the resolved configuration, section by section; empty if it cannot be read
    config_text: str  # the text of that file, including the origin of each value
    environment: dict[str, Any]  # versions, hardware and command of the run's last start
    metrics: list[dict[str, Any]]  # one object per optimizer step, in order
    samples: list[dict[str, Any]]
    gathers: list[Gather]  # every rank's memory, in order of steps; at least one rank in each
    traces: dict[int, dict[str, Any]]  # the traced step by rank, from `trace/rank{r}.json`
    plan: dict[str, Any] | None  # the prediction; None if the run was not planned
    experts: dict[str, Any] | None  # how evenly each layer's experts were used at last; None without experts
    ooms: dict[int, dict[str, Any]]  # post-mortems of ranks that ran out of memory, by rank
    restarts: list[str]  # the reasons why earlier starts ended, in order
    failures: list[tuple[int, str]]  # (rank, message) of the last start's errors, likely origin first
    profiles: list[Path]  # paths of the profiler's files
    notes: list[str]  # one line for each file, or part of one, that could not be read

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def last_rows(self) -> list[RankRow]:
        return self.gathers[-1].rows if self.gathers else []

    @property
    def targets(self) -> str:
        """The unit that the run's throughput counts."""
        return targets_called(self.setting("task.name"), self.setting("task.factory"))

    def setting(self, dotted: str) -> Any:
        """A config value by its dotted name; None if the config lacks it."""
        section, _, key = dotted.partition(".")
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None


def read_run(path: Path) -> Run:
    """Read all files that a run wrote."""
    if not path.is_dir():
        raise DataError(f"{path} is not a directory", "pass the run.dir of a run")
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "memory.jsonl")):
        raise DataError(
            f"{path} holds no run: no config.yaml, metrics.jsonl or memory.jsonl", "pass the run.dir of a run"
        )
    notes: list[str] = []
    text, config = _config(path / "config.yaml", notes)
    return Run(
        path=path,
        config=config,
        config_text=text,
        environment=_json(path / "env.json", notes, required=True) or {},
        metrics=_of_steps(path / "metrics.jsonl", notes),
        samples=_of_steps(path / "samples.jsonl", notes) if (path / "samples.jsonl").exists() else [],
        gathers=list(_gathers(path / "memory.jsonl", notes)),
        traces=_by_rank(path / "trace", notes),
        plan=_json(path / "plan.json", notes),
        experts=_json(path / "experts.json", notes),
        ooms=_by_rank(path / "oom", notes),
        restarts=[start.ended for start in job_starts.history(path, {})[0]]
        + [f"step {step}: {reason}" for step, reason in job_starts.restarts(path)],
        failures=_failures(path / "logs"),
        profiles=sorted(file for file in (path / "profile").glob("rank*") if file.name.endswith(PROFILED)),
        notes=notes,
    )


def _config(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    """The text of the config, which the page shows, and its values."""
    # The target of a link may be any file of this machine, and a report is sent to others.
    if path.is_symlink():
        notes.append(f"{path.name}: a link, whose target is not shown")
        return "", {}
    text = ""
    try:
        text = read_regular(path).decode(errors="replace")
        tree = read_yaml(text, "config.yaml").value
    except (OSError, ConfigError) as error:
        notes.append(error.cause if isinstance(error, ConfigError) else f"{path.name}: {error.strerror}")
        return text, {}
    return text, tree if isinstance(tree, dict) else {}


def _json(path: Path, notes: list[str], required: bool = False) -> dict[str, Any] | None:
    """One object from a file, or None; a failure is noted unless the file is absent and not `required`."""
    if not path.exists() and not required:
        return None
    try:
        content = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name}: {error.strerror if isinstance(error, OSError) else error}")
        return None
    if not isinstance(content, dict):
        notes.append(f"{path.name}: not an object")
        return None
    return content


def _opened(path: Path) -> IO[str]:
    return io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace")


def _lines(path: Path, notes: list[str], every: int = 1) -> Iterator[dict[str, Any]]:
    """Objects of every `every`-th line and of the last; a last line cut short by a kill is skipped."""
    torn, number = [], 0
    try:
        with _opened(path) as file:
            total = sum(1 for _ in file)
            file.seek(0)
            for number, line in enumerate(file, 1):
                if number % every and number != total:
                    continue
                if entry := parsed(line):
                    yield entry
                else:
                    torn.append(number)
    except OSError as error:
        notes.append(f"{path.name}: {error.strerror}")
    # Only the last line can be a write that a kill cut short; any other torn line is damage.
    if torn == [number]:
        notes.append(f"{path.name}: the last line was cut short, and is left out")
    elif torn:
        notes.append(f"{path.name}: {len(torn)} damaged lines are left out, the first is line {torn[0]}")


def _of_steps(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    return [line for line in _lines(path, notes) if isinstance(line.get("step"), int)]


def _gathers(path: Path, notes: list[str]) -> Iterator[Gather]:
    every, foreign = 1, 0
    with suppress(OSError), _opened(path) as file:  # `_lines` notes the error
        # Only every n-th gather: a long run of a large world then takes seconds and fits into memory.
        ranks = len(sequence(parsed(file.readline()).get("ranks")))
        every = max(1, (1 + sum(1 for _ in file)) * ranks // ROWS)
    if every > 1:
        notes.append(f"{path.name}: only every {every}th of its many gathers is shown, and the last")
    for line in _lines(path, notes, every):
        try:
            if line["schema"] not in READABLE:
                raise ValueError
            rows = [RankRow.from_json(row) for row in line["ranks"]]
            gather = Gather(int(line["step"]), float(line["time"]), rows)
        except (KeyError, TypeError, ValueError, AttributeError):
            foreign += 1
            continue
        if rows:
            yield gather
    if foreign:
        notes.append(
            f"{path.name}: {foreign} lines are not records of schema {READABLE[0]} to {READABLE[-1]}, and are left out"
        )


def _by_rank(folder: Path, notes: list[str]) -> dict[int, dict[str, Any]]:
    """The folder's `rank{r}.json` files by r."""
    by_rank = {}
    for path in folder.glob("rank*.json"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal() and (content := _json(path, notes)) is not None:
            by_rank[int(number)] = content
    return dict(sorted(by_rank.items()))


def _failures(logs: Path) -> list[tuple[int, str]]:
    """(rank, first line of its error) in the last launch; a plain torchrun leaves no failures."""
    launches = [folder for folder in logs.glob("*") if folder.is_dir() and failure.attempts(folder)]
    if not launches:
        return []
    newest = max(launches, key=lambda folder: folder.stat().st_mtime)
    failures = failure.in_attempt(failure.attempts(newest)[-1])
    return [(failed.rank, failed.message.partition("\n")[0]) for failed in failures if failed.exit_code]


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a dict, else an empty one: another program's file may hold anything."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """The value if it is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
