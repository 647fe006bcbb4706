"""The report of a script's run directory, which holds the logs of its starts and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from ..launch.failures import exit_codes, failure, job_starts
from .html import Cell, Page, folded, heading, paragraph, table, words

RUN_FILES = ("config.yaml", "metrics.jsonl", "memory.jsonl")
"""A directory with one of these is the run of a config."""
_TIME = re.compile(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)-node(\d+)-\d+")


@dataclass(frozen=True)
class ScriptStart:
    """One launcher's start of the script, on one node."""

    folder: Path
    began: str  # local time; empty if the folder's name does not tell it
    node: str
    attempts: int  # how often the launcher started the ranks
    failures: Sequence[failure.Failure]  # of the last attempt, likely origin first

    def log_of(self, failed: failure.Failure) -> Path | None:
        """The failed rank's stderr, if it is here."""
        attempt = failure.attempts(self.folder)[-1]
        for log in sorted(attempt.glob("*/stderr.log")):
            if log.parent.name == str(failed.local_rank if failed.local_rank is not None else failed.rank):
                return log
        return None


@dataclass(frozen=True)
class ScriptRun:
    """The run directory of a script: its launchers' starts in order of time, and why earlier jobs ended."""

    path: Path
    starts: Sequence[ScriptStart]
    ended: Sequence[str]

    @property
    def status(self) -> tuple[bool, str]:
        """(whether no rank of the last start failed, how the last start ended)."""
        newest = self.starts[-1]
        if not newest.failures:
            return True, "no rank of the last start reported an error"
        origin = newest.failures[0]
        return False, f"rank {origin.rank} failed: {_reason(origin)}"


def read_script(path: Path) -> ScriptRun | None:
    """The directory's starts; None if it is the run of a config, or no launcher has written there."""
    if any((path / name).exists() for name in RUN_FILES):
        return None
    folders = [*path.glob("logs/*"), *path.glob("logs/*/*")]
    starts = [_start(folder) for folder in folders if folder.is_dir() and failure.attempts(folder)]
    if not starts:
        return None
    ended = [start.ended for start in job_starts.history(path, {})[0]]
    ended += [reason for _, reason in job_starts.restarts(path)]
    return ScriptRun(path, sorted(starts, key=lambda start: (start.began, start.node)), ended)


def _start(folder: Path) -> ScriptStart:
    parts = _TIME.fullmatch(folder.name)
    began = "{}-{}-{} {}:{}:{}".format(*parts.groups()[:6]) if parts else ""
    failures = [failed for failed in failure.of_launcher(folder) if failed.exit_code != exit_codes.PREEMPTED]
    return ScriptStart(folder, began, parts[7] if parts else "", len(failure.attempts(folder)), failures)


def _reason(failed: failure.Failure) -> str:
    first_line = failed.message.partition("\n")[0]
    return first_line or exit_codes.describe(failed.exit_code)


def script_page(run: ScriptRun) -> str:
    well, how = run.status
    badge = Markup('<p><span class="badge{}" id="status">{}</span></p>').format("" if well else " bad", how)
    page = Page(run.path.resolve().name, badge)
    rows = [
        [words(start.began or start.folder.name), words(start.node), Cell(str(start.attempts), start.attempts),
         words(f"rank {start.failures[0].rank}: {_reason(start.failures[0])}" if start.failures
               else "no rank reported an error"), words(start.folder)]
        for start in run.starts
    ]  # fmt: skip
    parts = [table(["began", "node", ">starts of the ranks", "how it ended", "logs"], rows)]
    if run.ended:
        reasons = [[Cell(f"{number}"), words(reason)] for number, reason in enumerate(run.ended, 1)]
        parts += [heading("Why earlier starts ended"), table(["", "reason"], reasons)]
    parts.append(paragraph("A script has no metrics here: shardkit knows its starts and its ranks' logs.", "faint"))
    page.section("starts", "Starts", *parts)
    if run.starts[-1].failures:
        page.section("failure", "The last start's failure", *_failures(run.starts[-1]))
    return page.render()


def _failures(start: ScriptStart) -> list[Markup]:
    rows = []
    for failed in start.failures:
        log = start.log_of(failed)
        code = exit_codes.describe(failed.exit_code)
        rows.append([Cell(str(failed.rank), failed.rank), words(code), words(_reason(failed)), words(log or "–")])
    origin = start.failures[0]
    log = start.log_of(origin)
    text = origin.trace or ("" if log is None else failure.last_lines(failure.tail(log)))
    shown = [folded(f"Last lines of rank {origin.rank}", text)] if text else []
    return [table(["rank", "ended with", "reason", "log"], rows), *shown]
