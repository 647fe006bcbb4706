"""`shardkit report RUN_DIR [OTHER_RUN_DIR]` and `shardkit profile RUN_DIR [OTHER_RUN_DIR]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import printable, printable_lines
from .program import MaybePath


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run.dir of a run, finished or not.")],
    second: Annotated[
        MaybePath, typer.Argument(metavar="[OTHER_RUN_DIR]", help="A second run, to compare with the first.")
    ] = None,
    out: Annotated[
        MaybePath, typer.Option("--out", metavar="FILE", help="Default: report.html, or compare.html, in RUN_DIR.")
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares two: loss, every rank's memory, the plan.

    Of a script's run directory it shows the starts, and the failed rank with its log.
    """
    from ..report.compare import compare_page
    from ..report.measure import status
    from ..report.page import run_page, save
    from ..report.read import read_run
    from ..report.script import read_script, script_page

    path = out or run / ("report.html" if second is None else "compare.html")

    if second is None and (script := read_script(run)) is not None:
        save(script_page(script), path)
        verdict = script.status[1]
    else:
        contents = read_run(run)
        save(run_page(contents, path) if second is None else compare_page(contents, read_run(second)), path)
        verdict = status(contents)[1] if second is None else ""
    typer.echo(printable(f"{verdict}; report: {path}" if verdict else f"comparison: {path}"))


def profile(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run made with profile.start.")],
    second: Annotated[
        MaybePath, typer.Argument(metavar="[OTHER_RUN_DIR]", help="A second run, to show beside it.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print every profiled rank's summary as JSON.")] = False,
) -> None:
    """Show a run's profile: the peak by category, the largest allocations, where time goes."""
    import json

    from ..report.profile.show import compare, read_summaries, show

    folders = [run] if second is None else [run, second]
    names = list(map(str, folders))

    runs = [read_summaries(folder) for folder in folders]
    if json_output:
        summaries = [{"run": name, "ranks": ranks} for name, ranks in zip(names, runs, strict=True)]
        typer.echo(json.dumps({"runs": summaries}, indent=1))
        return
    shown = show(names[0], runs[0]) if second is None else compare((names[0], names[1]), (runs[0][0], runs[1][0]))
    typer.echo(printable_lines(shown))
