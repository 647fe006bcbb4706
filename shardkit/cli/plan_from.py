"""`shardkit plan --from` and `ladder --from`: plan a job that other tools' files describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .plan import DOES_NOT_FIT, NOT_PLANNED, CardOptions, PlanOutput, SearchOptions, search_and_print

if TYPE_CHECKING:
    from ..foreign.translate import Job
    from ..plan.advise import Change


def plan_files(
    job: Job, settings: Sequence[str], gpus: int | None, gpus_per_node: int | None, cards: CardOptions,
    search: SearchOptions, output: PlanOutput,
) -> int:  # fmt: skip
    """Plan the job of other tools' files, and print the plan; returns the exit code.

    Args:
        settings: `section.key=value`, for what no file says.
    """
    from ..errors import printable
    from ..foreign.advice import changes_in_their_keys
    from ..foreign.show import OVERRIDES, as_json, left_out, mapping, misfits, moments, save, show_moments, show_notes
    from ..plan.show import show

    overrides, unplanned = [*OVERRIDES, *settings], job.not_planned
    output.print("\n".join(mapping(job)) + "\n")
    config = job.load(overrides).config
    n_gpus = job.gpus if gpus is None else gpus
    per_node = (job.gpus_per_node if gpus_per_node is None else gpus_per_node) or 8
    target = cards.target(config, n_gpus, per_node, job.expandable)
    if search.auto:
        job.refuse_unplanned()
        search_and_print(str(save(job, search.out)), settings, target, cards, search, output)
        return 0
    with output.planner(job.name, target, job.loop) as (planner, waiting):
        output.first_look(planner, config, unplanned)
        estimate = planner.predict(config)
        is_misfit = estimate.verdict == "does not fit"
        other_moments = moments(job, config, estimate)
        too_large = list(misfits(other_moments, estimate, target.ranks_per_node))
        output.print(show(f"{job.name}: {config.parallel.strategy}", estimate, target, unplanned))
        output.print(*map(printable, show_notes(job)), "\n" + "\n".join((*show_moments(other_moments), *too_large)))
        output.print(*left_out(job, config, estimate))
        changes: list[Change] = []
        has_advice = is_misfit and output.advice and not unplanned
        if has_advice:
            waiting.now(f"{job.name}: planning changes that would fit, one after the other")
            changes = changes_in_their_keys(job, overrides, estimate, planner)

    def extend(document: dict[str, Any]) -> None:
        if unplanned:
            document |= {"verdict": "not planned", "verdict_without": estimate.verdict}
        document["from"] = {**as_json(job), "beside_the_steps": [asdict(moment) for moment in other_moments]}

    output.finish(estimate, changes, has_advice, extend)
    return NOT_PLANNED if unplanned else DOES_NOT_FIT if is_misfit or too_large else 0


def ladder_of_files(job: Job, settings: Sequence[str], cards: CardOptions, rungs: Sequence[str], out: Path) -> None:
    """Predict the rungs of a job of other tools' files; its loop is not run."""
    from ..foreign.advice import climb
    from ..foreign.show import OVERRIDES
    from ..plan.search import ladder as ladders
    from .ladder import print_and_save

    overrides = [*OVERRIDES, *settings]
    job.refuse_unplanned()
    config = job.load(overrides).config
    target = cards.target(config, job.gpus, min(job.gpus, job.gpus_per_node or 8), job.expandable)
    chosen = [ladders.parse_rung(text) for text in rungs] or ladders.default_rungs(job.gpus, config)[1:]
    typer.echo(f"{job.name} on {target.world_size} × {target.gpu.name if target.gpu else 'cpu'}\n", err=True)
    print_and_save(climb(job, overrides, chosen, target), target.device_memory, out)
