"""The section on crashes of docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

from .markdown import machine, paragraph, table

KINDS = {
    "forked": "Forked processes, killed before, in the middle of, or after a change on disk",
    "real": "Two ranks under torchrun or on a Slurm cluster of emulated nodes",
}


def crashes(result: dict[str, Any]) -> str:
    parts = [
        "## Runs that are ended anywhere",
        "",
        paragraph(
            "`python -m benchmarks.crashes` ends small trainings at seeded points and goes on with each. A case is a "
            "problem unless every word of success was true on disk, no file of the user's changed, and the run that "
            "went on has each step once, with the losses of a run that nothing disturbed."
        ),
    ]
    for kind, title in KINDS.items():
        found = result[kind]
        rows = [[name, str(row["cases"]), str(row["problems"])] for name, row in found["by_scenario"].items()]
        parts += ["", f"**{title}**: {found['cases']} of {result['asked'][kind]} cases have run.", ""]
        parts += [table(["scenario", "cases", "problems"], rows)] if rows else []
    return "\n".join([*parts, "", machine(result["environment"]), ""])
