"""`shardkit report RUN_DIR [OTHER_RUN_DIR] [--out FILE]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run.dir of a run, finished or not.")],
    other: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it at run time on Python 3.10
        typer.Argument(metavar="[OTHER_RUN_DIR]", help="A second run, to be compared with the first."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="FILE", help="Default: report.html, or compare.html, in RUN_DIR."),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares two: loss, every rank's memory, what was planned."""
    from ..errors import ShardkitError
    from ..report.compare import compare_page
    from ..report.page import run_page
    from ..report.read import read_run

    found = read_run(run)
    second = None if other is None else read_run(other)
    path = out or run / ("report.html" if second is None else "compare.html")
    text = run_page(found, path) if second is None else compare_page(found, second)
    try:
        draft = path.with_name(path.name + ".part")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ShardkitError(
            f"cannot write {path}: {error.strerror}", "pass --out with a place you can write"
        ) from error
    typer.echo(path)
