"""`shardkit report RUN_DIR [OTHER_RUN_DIR]` and `shardkit profile RUN_DIR [OTHER_RUN_DIR]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ..errors import printable, printable_lines


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run.dir of a run, finished or not.")],
    other: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it at run time on Python 3.10
        typer.Argument(metavar="[OTHER_RUN_DIR]", help="A second run, to compare with the first."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="FILE", help="Default: report.html, or compare.html, in RUN_DIR."),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares two: loss, every rank's memory, the plan."""
    from ..report.compare import compare_page
    from ..report.page import run_page, save
    from ..report.read import read_run

    found = read_run(run)
    second = None if other is None else read_run(other)
    path = out or run / ("report.html" if second is None else "compare.html")
    text = run_page(found, path) if second is None else compare_page(found, second)
    save(text, path)
    typer.echo(printable(path))


def profile(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run made with profile.start.")],
    other: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it at run time on Python 3.10
        typer.Argument(metavar="[OTHER_RUN_DIR]", help="A second run, to show beside it."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print every profiled rank's summary as JSON.")] = False,
) -> None:
    """Show a run's profile: the peak by category, the largest allocations, where time goes."""
    import json

    from ..report.profile.show import compare, read_summaries, show

    names = [str(run)] + ([] if other is None else [str(other)])
    runs = [read_summaries(Path(name)) for name in names]
    if json_output:
        found = [{"run": name, "ranks": ranks} for name, ranks in zip(names, runs, strict=True)]
        typer.echo(json.dumps({"runs": found}, indent=1))
    elif len(runs) == 1:
        typer.echo(printable_lines(show(names[0], runs[0])))
    else:
        typer.echo(printable_lines(compare((names[0], names[1]), (runs[0][0], runs[1][0]))))
