"""The section on crashes of docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

from .markdown import section, table

KINDS = {
    "forked": "Forked processes, killed before, in the middle of, or after a change on disk",
    "real": "Two ranks under torchrun or on a Slurm cluster of emulated nodes",
}


def crashes(result: dict[str, Any]) -> str:
    parts = []
    for kind, title in KINDS.items():
        found = result[kind]
        rows = [[name, str(row["cases"]), str(row["problems"])] for name, row in found["by_scenario"].items()]
        parts.append(f"**{title}**: {found['cases']} of {result['asked'][kind]} cases have run.")
        parts += [table(["scenario", "cases", "problems"], rows)] if rows else []
    return section(
        "Runs that are ended anywhere",
        "`python -m benchmarks.crashes` ends small trainings at seeded points and goes on with each. A case is a "
        "problem unless every word of success was true on disk, no file of the user's changed, and the run that "
        "went on has each step once, with the losses of a run that nothing disturbed.",
        *parts,
        environment=result["environment"],
    )


def moments(result: dict[str, Any]) -> str:
    rows = [
        [fault, moment, outcome, str(count)]
        for fault, by_moment in result["by_fault"].items()
        for moment, outcomes in by_moment.items()
        for outcome, count in outcomes.items()
    ]
    again = result.get("played_again")
    return section(
        "Slurm jobs that meet a fault at a drawn moment",
        "`python -m benchmarks.moments` plays faults on a Slurm cluster of two emulated nodes, several jobs at a "
        "time. A seed draws the template (torchrun, srun, a script of the user's own), the strategy, the fault, "
        "its moment, the seconds of a save (1 to 6; 25 to 45 for time limits) and Slurm's KillWait (20 to 60 s). "
        "The faults: a cancel (by scancel or `shardkit cancel`), the time limit in a save, a rank that stops in a "
        "save, dead processes on a living node, a rival that overwrites the same directory, an array whose logs "
        "are looked at, and nodes that differ. "
        "Each outcome has to be an allowed one, and each loss that of a run that nothing disturbs.",
        f"{result['draws']} of {result['asked']} draws have been played (seed {result['seed']}), "
        f"{len(result['problems'])} of them with a problem.",
        *([result["problems_note"]] if result.get("problems_note") else []),
        *([f"Played a second time: {again['draws']}; {again['why']}."] if again else []),
        table(["fault", "moment", "outcome", "draws"], rows),
        environment=result["environment"],
    )
