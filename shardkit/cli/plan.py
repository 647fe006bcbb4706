"""`shardkit plan`, `ladder` and `max-model`: predict each rank's memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from ..config.load import LoadedConfig
    from ..config.schema import RunConfig
    from ..foreign.translate import Job
    from ..plan.search.ladder import Step

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file; - for the defaults.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads it at run time on Python 3.10
    typer.Argument(metavar="[section.key=value]...", help="Overrides the file's value."),
]
Gpus = Annotated[int, typer.Option(metavar="N", help="GPUs of the whole job, one rank each.")]
GpuName = Annotated[Optional[str], typer.Option("--gpu", metavar="NAME", help="h100, a100-40gb, l4, …")]  # noqa: UP045
GpuMemory = Annotated[Optional[str], typer.Option(metavar="80GB", help="Per GPU, if not the card's.")]  # noqa: UP045
HostMemory = Annotated[Optional[str], typer.Option(metavar="1TB", help="Per machine.")]  # noqa: UP045
MemoryCap = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="24GiB", help="Emulate a smaller card, also on the CPU."),
]
From = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--from", metavar="FILE", help="Another tool's file in place of CONFIG; may be repeated."),
]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="DIR|config.json", help="--from: the transformers model."),
]
Peft = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="DIR|adapter_config.json", help="--from: the adapter that peft puts into it."),
]
ConfigOrFrom = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(metavar="CONFIG", help="A YAML file; - for the defaults."),
]
TheirGpus = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(metavar="N", help="GPUs of the whole job, one rank each. [default: 1, or what --from says]"),
]
BUDGET_S = 120.0


def plan(
    config: ConfigOrFrom = None,
    overrides: Overrides = None,
    theirs: From = None,
    model: Model = None,
    peft: Peft = None,
    gpus: TheirGpus = None,
    gpus_per_node: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="GPUs on each machine. [default: 8, or what --from says]"),
    ] = None,
    gpu: GpuName = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    memory_cap: MemoryCap = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    advice: Annotated[bool, typer.Option(help="If it does not fit, plan changes that would.")] = True,
    auto: Annotated[bool, typer.Option("--auto", help="Search for the fastest setting that fits.")] = False,
    margin: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0, max=0.9, help="--auto: share of the memory to leave free; default: the estimate's uncertainty."
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="--auto: search this long, keep the best.")
    ] = BUDGET_S,
    verify: Annotated[int, typer.Option(metavar="K", min=0, help="--auto: run the best K here for a few steps.")] = 0,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="--auto: where to write config.yaml, auto.json and the plot.")
    ] = Path("auto"),
) -> None:
    """Predict every rank's memory before CONFIG is launched: by phase and category, and whether it fits.

    With --auto, search engine and offload, activation checkpointing, precision and micro-batch for the setting that is
    predicted to be fastest among those that fit. The samples per step, and every key set on the command line, stay
    unchanged. After --budget seconds, or at Ctrl-C, the best so far is the result.

    With --from, plan the job that files of Accelerate, DeepSpeed or transformers' Trainer describe together, or a
    recipe of axolotl, LLaMA-Factory or TRL, and first say what each of their keys becomes here.

    Exit code 0 if it fits, 4 if it does not, 7 if a key of the files changes memory and is not planned.
    """
    import json
    from dataclasses import asdict

    from ..config.load import load_config
    from ..errors import ConfigError, printable
    from ..foreign.advice import changes_in_their_keys
    from ..foreign.files import foreign_file_error
    from ..foreign.show import OVERRIDES, as_json, left_out, mapping, misfits, moments, save, show_moments, show_notes
    from ..plan.advise import changes_that_fit
    from ..plan.client import Planner
    from ..plan.show import first_look, show, show_changes
    from ..plan.target import choose_target
    from .auto import plan_automatically
    from .progress import Waiting, say

    if not auto and (verify or margin is not None or out != Path("auto") or budget != BUDGET_S):
        raise ConfigError("--verify, --margin, --budget and --out belong to --auto, which is missing", "add --auto")
    job, path, given = asked(config, list(overrides or []), theirs or [], model, gpus, peft)
    ours = [*OVERRIDES, *given]

    def load(more: Sequence[str] = ()) -> LoadedConfig:
        return job.load([*ours, *more]) if job else load_config(path, [*given, *more], foreign_file_error)

    if job and not json_output:
        typer.echo("\n".join(mapping(job)) + "\n")
    loaded = load().config
    ranks = gpus if gpus is not None else job.gpus if job else 1
    per_node = gpus_per_node if gpus_per_node is not None else (job.gpus_per_node if job else None) or 8
    target = choose_target(
        loaded, ranks, per_node, gpu, gpu_memory, host_memory, memory_cap=memory_cap,
        expandable=job.expandable if job else True,
    )  # fmt: skip
    unplanned = job.not_planned if job else []
    if auto:
        if job:
            job.refuse_unplanned()
        path = str(save(job, out)) if job else path
        plan_automatically(path, given, target, margin, verify, memory_cap, out, json_output, budget)
        return
    name = job.name if job else "the defaults" if path is None else Path(path).name
    doing = f"planning {name}: tracing one step of the whole model"
    with Planner(target, loop=job.loop if job else None) as planner, Waiting(doing) as waiting:
        if not json_output and (look := planner.first_look(loaded)):
            say(first_look(look, unplanned))
        estimate = planner.predict(loaded)
        misfit = estimate.verdict == "does not fit"
        beside = moments(job, loaded, estimate) if job else []
        too_large = list(misfits(beside, estimate, target.ranks_per_node))
        if not json_output:
            typer.echo(show(f"{name}: {loaded.parallel.strategy}", estimate, target, unplanned))
            if job:
                for line in show_notes(job):
                    typer.echo(printable(line))
                typer.echo("\n" + "\n".join((*show_moments(beside), *too_large)))
                for line in left_out(job, loaded, estimate):
                    typer.echo(line)
        changes = []
        advises = misfit and advice and not unplanned
        if advises:
            waiting.now(f"{name}: planning changes that would fit, one after the other")
            changes = (
                changes_in_their_keys(job, ours, estimate, planner)
                if job
                else changes_that_fit(loaded, estimate, target, lambda more: planner.predict(load(more).config))
            )
    if json_output:
        tried = [{"settings": c.settings, "saving": c.saving, "cost": c.cost, "needs": c.estimate.needed,
                  "verdict": c.estimate.verdict, **({"in_the_files": c.said} if c.said else {})}
                 for c in changes]  # fmt: skip
        found: dict[str, Any] = {**estimate.to_json(), "changes": tried}
        if job:
            if unplanned:
                found |= {"verdict": "not planned", "verdict_without": estimate.verdict}
            found["from"] = {**as_json(job), "beside_the_steps": [asdict(one) for one in beside]}
        typer.echo(json.dumps(found, indent=1))
    elif advises:
        typer.echo("\n" + show_changes(changes))
    raise typer.Exit(7 if unplanned else 4 if misfit or too_large else 0)


def asked(
    config: str | None, overrides: list[str], theirs: list[str], model: str | None, gpus: int | None, peft: str | None
) -> tuple[Job | None, str | None, list[str]]:
    """The job of other tools' files or the path of a config (`None`: the defaults), and the overrides."""
    from ..errors import ConfigError
    from ..foreign.translate import read_job

    if not theirs:
        if model is not None:
            raise ConfigError(
                f"--model {model} belongs to --from; a config has model.hf_config", f"add model.hf_config={model}"
            )
        if peft is not None:
            raise ConfigError(
                f"--peft {peft} belongs to --from; a config has a section adapter",
                "set adapter.type=lora, adapter.r, …",
            )
        if config is None:
            raise ConfigError(
                "no config is named", "name a YAML file, - for the defaults, or --from with another tool's file"
            )
        return None, None if config == "-" else config, overrides
    words = [*([] if config is None else [config]), *overrides]
    files = [word for word in words if "=" not in word]  # --from a.yaml b.json: the second is a file too
    settings = [word for word in words if "=" in word]
    return read_job([*theirs, *files], model, gpus, peft, settings), None, settings


def ladder(
    config: ConfigOrFrom = None,
    overrides: Overrides = None,
    theirs: From = None,
    model: Model = None,
    peft: Peft = None,
    gpus: TheirGpus = None,
    gpu: GpuName = None,
    gpu_memory: GpuMemory = None,
    memory_cap: MemoryCap = None,
    rung: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="'NAME: key=value …'", help="Instead of the usual rungs; may be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=3, help="Steps of each rung.")] = 6,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write runs, table, plot.")] = Path("ladder"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Predict only; needs no GPU.")] = False,
) -> None:
    """Try one technique after another on CONFIG's model: the memory of each, predicted and measured, and its speed.

    Every rung runs in fresh processes; running out of memory is a result.

    With --from, predict the rungs of the job that files of Accelerate, DeepSpeed or transformers' Trainer, or a recipe
    of axolotl, LLaMA-Factory or TRL, describe, each as a change of these files. Their loop is not run.
    """
    from ..config.load import load_config
    from ..foreign.files import foreign_file_error
    from ..plan.search import ladder as ladders
    from ..plan.target import cap_setting, choose_target, target_here

    job, path, given = asked(config, list(overrides or []), theirs or [], model, gpus, peft)
    if job:
        _ladder_of_theirs(job, given, gpu, gpu_memory, memory_cap, rung or [], out)
        return
    gpus = 1 if gpus is None else gpus

    def load(more: Sequence[str]) -> RunConfig:
        return load_config(path, [*given, *more], foreign_file_error).config

    rungs = [ladders.parse_rung(text) for text in rung or []] or ladders.default_rungs(gpus, load([]))
    first = load(rungs[0].settings)
    if dry_run:
        target, try_it = choose_target(first, gpus, gpus, gpu, gpu_memory, memory_cap=memory_cap), None
    else:
        _refuse_gpu_memory(gpu_memory)
        target = target_here(first, gpus, gpu, memory_cap)
        try_it = ladders.tried(path, given, gpus, out, steps, cap_setting(memory_cap))
    _print_and_save(ladders.climb(load, rungs, target, try_it), target.device_memory, out)


def _ladder_of_theirs(
    job: Job, given: list[str], gpu: str | None, gpu_memory: str | None, memory_cap: str | None, rungs: list[str],
    out: Path,
) -> None:  # fmt: skip
    """Predict the rungs of a job of other tools."""
    from ..foreign.advice import climb
    from ..foreign.show import OVERRIDES
    from ..plan.search import ladder as ladders
    from ..plan.target import choose_target

    ours = [*OVERRIDES, *given]
    job.refuse_unplanned()
    loaded = job.load(ours).config
    per_node = min(job.gpus, job.gpus_per_node or 8)
    target = choose_target(
        loaded, job.gpus, per_node, gpu, gpu_memory, memory_cap=memory_cap, expandable=job.expandable
    )
    chosen = [ladders.parse_rung(text) for text in rungs] or ladders.default_rungs(job.gpus, loaded)[1:]
    typer.echo(f"{job.name} on {target.world_size} × {target.gpu.name if target.gpu else 'cpu'}\n", err=True)
    _print_and_save(climb(job, ours, chosen, target), target.device_memory, out)


def _print_and_save(steps: Iterator[Step], limit: int | None, out: Path) -> None:
    from ..errors import ConfigError
    from ..plan.search import ladder as ladders
    from ..report.plot import save_ladder

    found: list[Step] = []
    for step in steps:
        found.append(step)
        rows = ladders.table([step]).splitlines()
        typer.echo("\n".join(rows[-1:] if len(found) > 1 else rows))
    typer.echo(f"written: {ladders.save(found, out, limit)}", err=True)
    try:
        typer.echo(f"written: {save_ladder(found, limit, out)}", err=True)
    except ConfigError as error:
        typer.echo(f"no plot: {error.cause}; {error.fix}", err=True)


def _refuse_gpu_memory(gpu_memory: str | None) -> None:
    from ..errors import ConfigError

    if gpu_memory is not None:
        raise ConfigError(
            f"--gpu-memory {gpu_memory}: real runs have the memory of this machine's cards",
            "pass --memory-cap for a smaller one, or predict only",
        )


def max_model(
    config: Config,
    overrides: Overrides = None,
    find: Annotated[str, typer.Option(metavar="model|batch", help="The most parameters, or samples.")] = "model",
    gpus: Gpus = 1,
    gpu: GpuName = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    memory_cap: MemoryCap = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="Train sizes around the boundary here.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the runs of --confirm.")] = Path("max-model"),
) -> None:
    """Find the largest model, or micro-batch, that CONFIG's settings can train, by prediction or real steps."""
    from ..config.load import load_config, resolve_batch
    from ..errors import ConfigError, gib
    from ..foreign.files import foreign_file_error
    from ..plan.search.ladder import tried
    from ..plan.search.max_model import batch_sizes, largest, model_sizes
    from ..plan.target import cap_setting, choose_target, target_here

    if find not in ("model", "batch"):
        raise ConfigError(f"--find {find} is neither model nor batch", "pass --find model or --find batch")
    path, given = (None if config == "-" else config), list(overrides or [])

    def load(more: Sequence[str]) -> RunConfig:
        return load_config(path, [*given, *more], foreign_file_error).config

    start = load([])
    if find == "model" and (start.task.factory is not None or start.task.name != "causal_lm"):
        raise ConfigError(
            "--find model varies the reference transformer's layers and width, but the task has another model",
            "pass --find batch, or use task.name=causal_lm",
        )
    try_it = None
    if confirm:
        _refuse_gpu_memory(gpu_memory)
        target = target_here(start, gpus, gpu, memory_cap)
        try_it = tried(path, given, gpus, out, 3, cap_setting(memory_cap))
    else:
        target = choose_target(start, gpus, gpus, gpu, gpu_memory, host_memory, memory_cap=memory_cap)
    if find == "batch":
        sizes = batch_sizes(resolve_batch(start, gpus) if start.train.global_batch_size is not None else None)
    else:
        limit = (target.device_memory or 0) * gpus + (1 << 40)
        sizes = model_sizes(start.model, limit / 2, 16 if start.precision.mode == "fp8" else 1)
    found = largest(load, sizes, target, try_it, look_ahead=6 if find == "model" else 0)
    what = "samples" if find == "batch" else "parameters"
    how = f"confirmed by {found.attempts} real runs: the next size ran out of memory" if confirm else "predicted"
    typer.echo(f"largest   {found.largest.amount:,} {what}: {' '.join(found.largest.settings)}")
    short = "; the next one is short of host memory" if found.limited_by == "host" else ""
    typer.echo(f"needs     {gib(found.predicted)} of {gib(target.device_memory or 0)} (predicted){short}")
    typer.echo(
        f"next      {found.next_up.amount:,} {what} ({found.next_up.amount / found.largest.amount - 1:+.1%}): {how}"
    )
