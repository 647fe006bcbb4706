"""`shardkit profile RUN_DIR [OTHER_RUN_DIR]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def profile(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run made with profile.start.")],
    other: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it at run time on Python 3.10
        typer.Argument(metavar="[OTHER_RUN_DIR]", help="A second one, to be shown beside it."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="For programs: every profiled rank's summary.")] = False,
) -> None:
    """Show what a run's profile found: the peak by category, who allocates most, where time goes."""
    import json

    from ..telemetry.profile.files import read_summaries
    from ..telemetry.profile.show import compare, show

    names = [str(run)] + ([] if other is None else [str(other)])
    runs = [read_summaries(Path(name)) for name in names]
    if json_output:
        found = [{"run": name, "ranks": ranks} for name, ranks in zip(names, runs, strict=True)]
        typer.echo(json.dumps({"runs": found}, indent=1))
    elif len(runs) == 1:
        typer.echo(show(names[0], runs[0]))
    else:
        typer.echo(compare((names[0], names[1]), (runs[0][0], runs[1][0])))
