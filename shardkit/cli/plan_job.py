"""Plan one job and print the plan, whether a config or other tools' files describe the job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from ..config.schema import RunConfig, RunSection
from ..errors import ConfigError, printable
from ..launch.local import run_dir
from ..plan.advise import LIMIT_S, Change, Changes
from ..plan.client import Planner
from ..plan.model.estimate import MemoryEstimate
from ..plan.show import first_look, show, show_changes
from ..plan.submit_check import Advisor
from ..plan.target import Target
from .progress import Waiting, say

FITS, MISFIT, NOT_PLANNED = 0, 4, 7
"""Exit codes."""


@dataclass(frozen=True)
class Details:
    """What the printed plan has beyond the estimate.

    Attributes:
        lines: printed below the estimate.
        misfits: reasons, beside the steps, why the job does not fit.
        fields: added to the JSON.
    """

    lines: Sequence[str] = ()
    misfits: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanJob:
    """A job to plan.

    Attributes:
        name: the file, or files, that describe it.
        advisor: plans changes that would fit.
        details: what to print beyond an estimate of the job; nothing for a config.
        loop: for the planner: how another tool's loop differs from shardkit's.
        not_planned: a line for each setting that the estimate lacks; with one there is no verdict.
    """

    name: str
    config: RunConfig
    target: Target
    advisor: Advisor
    details: Callable[[MemoryEstimate], Details] = lambda estimate: Details()
    loop: Mapping[str, Any] | None = None
    not_planned: Sequence[str] = ()


def note_refused_start(run: RunSection) -> None:
    """Note on stderr why training would not start in this directory; a plan reads neither runs nor checkpoints."""
    path, cause = Path(run.dir), ""
    try:
        if run.source is not None and not Path(run.source).exists():
            cause = f"run.resume={run.source} does not exist"
        elif not run_dir.has_run(path):
            run_dir.refuse_without_run(path, run.resume)
    except (ConfigError, OSError) as error:
        cause = error.cause if isinstance(error, ConfigError) else str(error)
    if cause:
        say(f"note: training would be refused here, which a plan does not depend on: {printable(cause)}")


def print_plan(subject: PlanJob, as_json: bool, advice: bool) -> int:
    """Plan a job, print the plan, and return the exit code.

    Args:
        advice: whether to plan changes of a job that does not fit.
    """
    work = f"planning {subject.name}: tracing one step of the whole model"
    changes = Changes()
    with Planner(subject.target, loop=subject.loop) as planner, Waiting(work) as waiting:
        if not as_json and (rough_estimate := planner.first_look(subject.config)):
            say(first_look(rough_estimate, subject.not_planned))
        estimate = planner.predict(subject.config)
        details, misfit = subject.details(estimate), estimate.verdict == "does not fit"
        if not as_json:
            title = f"{subject.name}: {subject.config.parallel.strategy}"
            typer.echo(show(title, estimate, subject.target, subject.not_planned))
            for line in details.lines:
                typer.echo(line)
        advises = misfit and advice and not subject.not_planned
        if advises:
            waiting.now(f"{subject.name}: planning changes that would fit, for at most {LIMIT_S:.0f} s")
            changes = subject.advisor(estimate, planner)
    if as_json:
        tree = {**estimate.to_json(), "changes": [change_as_json(change) for change in changes], **details.fields}
        tree |= {"not_tried": list(changes.left_out)} if changes.left_out else {}
        typer.echo(json.dumps(tree, indent=1))
    elif advises:
        typer.echo("\n" + show_changes(changes))
    return NOT_PLANNED if subject.not_planned else MISFIT if misfit or details.misfits else FITS


def change_as_json(change: Change) -> dict[str, Any]:
    """A planned change for programs."""
    tree = {
        "settings": change.settings, "saving": change.saving, "cost": change.cost, "needs": change.estimate.needed,
        "verdict": change.estimate.verdict,
    }  # fmt: skip
    tree |= {"rough": True} if change.rough else {}
    return tree | ({"in_the_files": change.in_the_files} if change.in_the_files else {})
