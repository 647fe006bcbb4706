"""`shardkit report RUN_DIR [OTHER_RUN_DIR]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import printable
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

    For a script's run directory, it shows the starts, and the failed rank with its log.
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
