"""`shardkit checkpoint ls|verify|rm RUN` and `shardkit convert SOURCE --to FORMAT --out DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import printable
from .program import MaybePath, Text

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
    """Read whole checkpoints and compare every checksum; exit code 1 if one is damaged."""
    from ..checkpoint import manage

    damaged = 0
    paths = manage.select(run, which) if which else [e.path for e in manage.entries(run) if not e.path.suffix]
    for path in paths:
        problems = manage.verify(path)
        typer.echo(printable(f"{path.name}: {'damaged' if problems else 'intact'}"))
        for problem in problems:
            typer.echo(f"  {printable(problem)}")
        damaged += bool(problems)
    if damaged:
        raise typer.Exit(1)


@app.command("rm")
def rm(
    run: Run,
    which: Annotated[list[str], typer.Argument(metavar="STEP...", help="Step numbers or folder names.")],
    force: Annotated[bool, typer.Option("--force", help="Delete even the last one to resume from.")] = False,
) -> None:
    """Delete checkpoints."""
    from ..checkpoint import manage

    paths = manage.select(run, which)
    freed = sum(manage.size_of(path) for path in paths)
    manage.remove(run, paths, force)
    typer.echo(f"deleted {printable(', '.join(path.name for path in paths))} ({freed / 2**30:.3f} GiB)")


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A run, a checkpoint, or weights of another tool.")],
    to: Annotated[str, typer.Option("--to", metavar="safetensors|torch|shardkit|peft", help="Format to write.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new or empty directory.")],
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest safetensors file.")
    ] = "5GB",
    dtype: Annotated[
        Text, typer.Option(metavar="fp32|bf16|fp16", help="Type of the weights; default: unchanged.")
    ] = None,
    step: Annotated[str, typer.Option(metavar="N|latest|best", help="Which checkpoint of a run.")] = "latest",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave optimizer state behind (--to shardkit).")
    ] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Write the weights' moving average (train.ema_decay).")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Write the model with the adapter added to it.")] = False,
    base: Annotated[
        MaybePath,
        typer.Option(metavar="PATH", help="Weights that the adapter was trained on (--merge); default: as in the run."),
    ] = None,
) -> None:
    """Write a checkpoint as safetensors or a torch state dict, or make one from another tool's."""
    from ..checkpoint.formats.convert import convert as run
    from ..config import libraries

    libraries.quiet()
    conversion = run(
        source, to, out, max_shard_size=max_shard_size, dtype=dtype, step=step, weights_only=weights_only, average=ema,
        merge=merge, base=base,
    )  # fmt: skip
    for note in conversion.notes:
        typer.echo(f"note: {printable(note)}", err=True)
    typer.echo(printable(f"read {conversion.kind} checkpoint {conversion.source}: {conversion.n_tensors} tensors"))
    for file in conversion.files:
        size = file.stat().st_size
        shown = f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size:,} bytes"
        typer.echo(printable(f"wrote {file} ({shown})"))
