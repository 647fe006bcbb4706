"""`shardkit checkpoint ls|verify|rm RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="checkpoint", help="List, verify and remove a run's checkpoints.", no_args_is_help=True)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or its checkpoints folder.")]
Which = Annotated[list[str] | None, typer.Argument(metavar="[STEP]...", help="Step numbers or folder names.")]


@app.command("ls")
def ls(run: Run) -> None:
    """List the checkpoints: step, state, who made them, size, validation loss."""
    from ..checkpoint import manage

    typer.echo(manage.table(manage.entries(run)))


@app.command("verify")
def verify(run: Run, which: Which = None) -> None:
    """Read checkpoints whole and compare every checksum; exit code 1 if one is damaged."""
    from ..checkpoint import manage

    paths = manage.select(run, which) if which else [e.path for e in manage.entries(run) if not e.path.suffix]
    damaged = 0
    for path in paths:
        problems = manage.verify(path)
        typer.echo(f"{path.name}: {'damaged' if problems else 'intact'}")
        for problem in problems:
            typer.echo(f"  {problem}")
        damaged += bool(problems)
    if damaged:
        raise typer.Exit(1)


@app.command("rm")
def rm(
    run: Run,
    which: Annotated[list[str], typer.Argument(metavar="STEP...", help="Step numbers or folder names.")],
    force: Annotated[bool, typer.Option("--force", help="Also the last one the run could resume from.")] = False,
) -> None:
    """Delete checkpoints."""
    from ..checkpoint import manage

    paths = manage.select(run, which)
    freed = sum(manage.size_of(path) for path in paths)
    manage.remove(run, paths, force)
    typer.echo(f"deleted {', '.join(path.name for path in paths)} ({freed / 2**30:.3f} GiB)")
