"""`shardkit ladder` and `max-model`: one technique after another, and the largest model that fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, gib
from .plan import CardOptions, ConfigJob, GpuMemory, GpuName, HostMemory, MemoryCap
from .program import Overrides, Words

if TYPE_CHECKING:
    from ..plan.search.ladder import Step

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file; - for the defaults.")]
Gpus = Annotated[int, typer.Option(metavar="N", help="GPUs of the whole job, one rank each.")]


def ladder(
    config: Config,
    overrides: Overrides = None,
    *,
    gpus: Gpus = 1,
    gpu: GpuName = None,
    gpu_memory: GpuMemory = None,
    memory_cap: MemoryCap = None,
    rung: Annotated[
        Words, typer.Option(metavar="'NAME: key=value …'", help="Instead of the usual rungs; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=3, help="Steps of each rung.")] = 6,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write runs, table, plot.")] = Path("ladder"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Predict only; needs no GPU.")] = False,
) -> None:
    """Try one technique after another on CONFIG's model: the memory of each, predicted and measured, and its speed.

    Every rung runs in fresh processes; running out of memory is a result.
    """
    from ..plan.search import ladder as ladders
    from ..plan.target import target_here
    from ..report.plot import save_ladder

    job = ConfigJob(config, tuple(overrides or ()))
    rungs = [ladders.parse_rung(text) for text in rung or []] or ladders.default_rungs(gpus, job.config())
    lowest = job.config(rungs[0].settings)
    if dry_run:
        target, try_it = CardOptions(gpus, gpus, gpu, gpu_memory, None, memory_cap).target(lowest), None
    else:
        _refuse_gpu_memory(gpu_memory)
        target = target_here(lowest, gpus, gpu, memory_cap)
        try_it = job.tried(gpus, out, steps, memory_cap)
    limit = target.device_memory
    done_steps: list[Step] = []
    for step in ladders.climb(job.config, rungs, target, try_it):  # each rung is shown as soon as it is done
        done_steps.append(step)
        rows = ladders.table([step]).splitlines()
        typer.echo("\n".join(rows[-1:] if len(done_steps) > 1 else rows))
    typer.echo(f"written: {ladders.save(done_steps, out, limit)}", err=True)
    try:
        typer.echo(f"written: {save_ladder(done_steps, limit, out)}", err=True)
    except ConfigError as error:
        typer.echo(f"no plot: {error.cause}; {error.fix}", err=True)


def _refuse_gpu_memory(gpu_memory: str | None) -> None:
    if gpu_memory is not None:
        cause = f"--gpu-memory {gpu_memory}: real runs have the memory of this machine's cards"
        raise ConfigError(cause, "pass --memory-cap for a smaller one, or predict only")


def max_model(
    config: Config,
    overrides: Overrides = None,
    *,
    find: Annotated[
        str, typer.Option(metavar="model|batch|length", help="The most parameters, samples, or tokens a sequence.")
    ] = "model",
    gpus: Gpus = 1,
    gpu: GpuName = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    memory_cap: MemoryCap = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="Train sizes around the boundary here.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the runs of --confirm.")] = Path("max-model"),
) -> None:
    """Find the largest model or micro-batch, or the longest sequence, CONFIG trains: by prediction, or real steps."""
    from ..config.load import resolve_batch
    from ..plan.search.ladder import batch_sizes, largest, lengths, model_sizes
    from ..plan.target import target_here

    if find not in ("model", "batch", "length"):
        raise ConfigError(f"--find {find} is neither model, batch nor length", "pass --find model, batch or length")
    job = ConfigJob(config, tuple(overrides or ()))
    start = job.config()
    if find == "model" and (start.task.factory is not None or start.task.name != "causal_lm"):
        cause = "--find model varies the reference transformer's layers and width, but the task has another model"
        raise ConfigError(cause, "pass --find batch, or use task.name=causal_lm")
    try_it = None
    if confirm:
        _refuse_gpu_memory(gpu_memory)
        target = target_here(start, gpus, gpu, memory_cap)
        try_it = job.tried(gpus, out, 3, memory_cap)
    else:
        target = CardOptions(gpus, gpus, gpu, gpu_memory, host_memory, memory_cap).target(start)
    if find == "length":
        if start.task.factory is not None or start.task.name not in ("causal_lm", "hf_causal_lm"):
            raise ConfigError("--find length is for causal language models", "pass --find batch")
        sizes = lengths(start)
    elif find == "batch":
        sizes = batch_sizes(resolve_batch(start, gpus) if start.train.global_batch_size is not None else None)
    else:
        limit = (target.device_memory or 0) * gpus + (1 << 40)
        sizes = model_sizes(start.model, limit / 2, 16 if start.precision.mode == "fp8" else 1)
    answer = largest(job.config, sizes, target, try_it, look_ahead=6 if find == "model" else 0)
    size, next_size, unit = (
        answer.largest,
        answer.next_up,
        {"model": "parameters", "batch": "samples", "length": "tokens"}[find],
    )
    typer.echo(f"largest   {size.amount:,} {unit}: {' '.join(size.settings)}")
    short = "; the next one is short of host memory" if answer.limited_by == "host" else ""
    typer.echo(f"needs     {gib(answer.predicted)} of {gib(target.device_memory or 0)} (predicted){short}")
    how = f"confirmed by {answer.attempts} real runs: the next size ran out of memory" if confirm else "predicted"
    typer.echo(f"next      {next_size.amount:,} {unit} ({next_size.amount / size.amount - 1:+.1%}): {how}")
