"""`shardkit ladder` and `max-model`: one technique after another, and the largest model that fits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from .plan import CardOptions, ConfigJob, GpuMemory, GpuName, HostMemory, MemoryCap, refuse_gpu_memory
from .program import Count, Overrides, Words
from .progress import Waiting

if TYPE_CHECKING:
    from ..plan.search.ladder import Size, Step

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
        refuse_gpu_memory(gpu_memory)
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


def max_model(
    config: Config,
    overrides: Overrides = None,
    *,
    find: Annotated[
        str, typer.Option(metavar="model|batch", help="The most parameters, or samples of a micro-batch.")
    ] = "model",
    gpus: Gpus = 1,
    gpus_per_node: Annotated[Count, typer.Option(metavar="N", help="GPUs on each machine. [default: 8]")] = None,
    gpu: GpuName = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    memory_cap: MemoryCap = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="Train sizes around the boundary here.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the runs of --confirm.")] = Path("max-model"),
) -> None:
    """Find the largest model, or micro-batch, that CONFIG's settings can train: by prediction, or real steps.

    Ranks share samples, layers and experts (parallel.cp, tp and ep) in groups of every size that fits a node, unless
    the key is on the command line.
    """
    from ..config.load import resolve_batch
    from ..plan.search.ladder import (
        batch_sizes,
        largest_layout,
        layouts_to_try,
        model_sizes,
        show_beyond,
        show_boundary,
    )
    from ..plan.target import target_here

    if find not in ("model", "batch"):
        fix = "shardkit plan --longest" if find == "length" else "pass --find model or --find batch"
        raise ConfigError(f"--find {find} is neither model nor batch", fix)
    job = ConfigJob(config, tuple(overrides or ()))
    start = job.config()
    if find == "model" and (start.task.factory is not None or start.task.name != "causal_lm"):
        cause = "--find model varies the reference transformer's layers and width, but the task has another model"
        raise ConfigError(cause, "pass --find batch, or use task.name=causal_lm")
    try_it = None
    if confirm:
        refuse_gpu_memory(gpu_memory)
        if gpus_per_node is not None:
            raise ConfigError("--confirm trains all ranks on this machine", "leave --gpus-per-node out")
        target = target_here(start, gpus, gpu, memory_cap)
        try_it = job.tried(gpus, out, 3, memory_cap)
    else:
        target = CardOptions(gpus, gpus_per_node, gpu, gpu_memory, host_memory, memory_cap).target(start)
    accumulated = resolve_batch(start, gpus) if find == "batch" and start.train.global_batch_size is not None else None
    limit, multiple = (target.device_memory or 0) * gpus + (1 << 40), 16 if start.precision.mode == "fp8" else 1

    @cache
    def sizes(sharing: int) -> Sequence[Size]:
        if find == "batch":
            return batch_sizes(accumulated, gpus // sharing)
        return model_sizes(start.model, limit / 2, multiple, sharing)

    unit = {"model": "parameters", "batch": "samples"}[find]
    layouts = layouts_to_try(start, target, job.fixed_keys, sizes)
    with Waiting(f"searching the largest {find} of {job.name} over {len(layouts)} layouts of ranks"):
        answer, compared = largest_layout(job.config, layouts, target, try_it, look_ahead=6 if find == "model" else 0)
    typer.echo(show_boundary(answer, unit, target.device_memory or 0))
    if compared:
        typer.echo("\n" + show_beyond(compared, unit))
