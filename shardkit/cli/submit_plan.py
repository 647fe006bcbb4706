"""The plan of a job that `shardkit submit` is about to queue: a job that cannot fit is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, LaunchError, NotPlannedError, gib
from .job_words import ConfigJob, JobWords, Model, Peft
from .program import OPTION_WORDS, SCRIPT_WORDS, Program, Text, Words, index_of_script, missing_dashes

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..foreign.translate import ForeignJob
    from ..launch.spec import JobSpec
    from ..plan.model.estimate import MemoryEstimate


@dataclass(frozen=True)
class PlanOptions:
    """Options of `shardkit submit` for the job's plan: the cards, and the files that describe a script."""

    gpu: Annotated[Text, typer.Option(metavar="NAME", help="Plan the job for the cluster's cards (h100, …).")] = None
    gpu_memory: Annotated[Text, typer.Option(metavar="80GB", help="Or for cards of this size.")] = None
    from_files: Annotated[
        Words, typer.Option("--from", metavar="FILE", help="Plan a script by another tool's file; may be repeated.")
    ] = None
    model: Model = None
    peft: Peft = None
    force: Annotated[bool, typer.Option("--force", help="Submit it even if it would not fit.")] = False
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="First rehearse it on emulated cards of --gpu; submit it if it fits.")
    ] = False

    @property
    def describes_script(self) -> bool:
        """Whether files describe a script's job, or an option that belongs to them was given."""
        return bool(self.from_files or self.model or self.peft)

    def check(self) -> None:
        """Refuse a rehearsal whose verdict would not count.

        Raises:
            LaunchError: --rehearse and --force.
        """
        if self.rehearse and self.force:
            raise LaunchError("--force submits a job that does not fit, and --rehearse one that does", "remove one")


def files_of_script(ctx: typer.Context, config: str | None, overrides: Sequence[str], options: PlanOptions) -> JobWords:
    """The files of a script's job and its settings, among the words before `--`, without those of an array's index.

    Raises:
        LaunchError: there is no script, no file, or no card to plan for.
    """
    if not options.from_files:
        option = "--model" if options.model else "--peft"
        raise LaunchError(f"{option} belongs to --from, which is missing", "add --from with the files of the trainer")
    words = [*([] if config is None else [config]), *overrides]
    if ctx.meta[SCRIPT_WORDS] is None:
        index = index_of_script(words)
        if index is not None:
            raise LaunchError(*missing_dashes(ctx, ctx.meta[OPTION_WORDS].index(words[index])))
        raise LaunchError(
            "--from describes the job of a script, and none is given",
            "name it behind `--`: shardkit submit --from FILE --model DIR --gpu h100 -- train.py arguments",
        )
    if config == "-":
        raise LaunchError("both --from and a config (-) were given", "remove one of them")
    if not (options.gpu or options.gpu_memory):
        raise LaunchError(
            "--from says what to plan, but nothing says for which cards",
            "add --gpu NAME or --gpu-memory SIZE, or remove --from",
        )
    of_all_tasks = [word for word in words if "=" not in word or "%a" not in word]
    return JobWords(None, of_all_tasks, options.from_files, options.model, options.peft)


def plan_job(
    program: Program, files: JobWords | None, spec: JobSpec, options: PlanOptions, mem: str | None
) -> tuple[MemoryEstimate, RunConfig]:
    """Plan a job, without overrides that hold an array's index; returns the estimate and the planned config.

    Args:
        files: describe a script's job; None for a config.
        mem: host memory per node, as Slurm writes it.

    Raises:
        ConfigError: the job does not fit, asks for no GPU, or its files leave something open.
        NotPlannedError: a key of the files changes memory, and no plan models it.
    """
    from ..plan.submit_check import refuse_misfit
    from ..plan.target import choose_target

    if not spec.gpus_per_node:
        raise ConfigError("--gpu asks for a plan, but the job asks for no GPU", "pass --gpus-per-node N, or no --gpu")
    # Slurm's sizes are binary: K, M, G, T; a plain number means MiB.
    host_memory = f"{mem}M" if mem is not None and mem.isdigit() else mem
    if files is not None:
        return _plan_by_files(files, spec, options, host_memory)
    described = ConfigJob(str(program.config), tuple(program.overrides_of_all_tasks))
    config, n_ranks = described.config(), spec.nproc_per_node * spec.nodes[1]
    target = choose_target(config, n_ranks, spec.nproc_per_node, options.gpu, options.gpu_memory, host_memory)
    return refuse_misfit(config, target, described.changes), config


def plan_first(
    program: Program, files: JobWords | None, spec: JobSpec, options: PlanOptions, mem: str | None, err: bool
) -> tuple[MemoryEstimate, RunConfig] | None:
    """Plan a job if an option asks for it, and show the verdict; None where there is no plan.

    Where a rehearsal follows, it judges a script without files, and keys that no plan models.

    Args:
        err: whether the verdict goes to stderr.
    """
    if not (options.gpu or options.gpu_memory) or options.force:
        return None
    if options.rehearse and files is None and program.script is not None:
        return None
    try:
        plan = plan_job(program, files, spec, options, mem)
    except NotPlannedError as error:
        if not options.rehearse:
            raise
        typer.echo(f"{error.cause}: the rehearsal decides", err=True)
        return None
    typer.echo(verdict(plan[0]), err=err)
    return plan


def verdict(estimate: MemoryEstimate) -> str:
    """One line: the memory that the job needs, and whether it fits."""
    return f"planned: {gib(estimate.needed)} of {gib(estimate.device_memory or 0)} on each GPU: {estimate.verdict}"


def _plan_by_files(
    files: JobWords, spec: JobSpec, options: PlanOptions, host_memory: str | None
) -> tuple[MemoryEstimate, RunConfig]:
    """Plan a script's job by the files of its trainer: its steps, its loading and its saving."""
    from ..foreign.show import left_out, misfits, moments
    from ..plan.submit_check import refuse_misfit
    from ..plan.target import choose_target

    described = files.files_job(spec.nproc_per_node * spec.nodes[1])
    job = described.job
    job.refuse_unplanned("submit it anyway with --force")
    config = described.config()
    target = choose_target(
        config, job.gpus, spec.nproc_per_node, options.gpu, options.gpu_memory, host_memory, expandable=job.expandable
    )
    estimate = refuse_misfit(config, target, described.changes, job.loop)
    misfit_lines = list(misfits(moments(job, config, estimate), estimate, target.ranks_per_node))
    if misfit_lines:
        fix = next((line.strip().removeprefix("fix: ") for line in misfit_lines[1:2]), "")
        raise ConfigError(misfit_lines[0], f"{fix or 'use more or larger GPUs'}, or submit it anyway with --force")
    doubts = [line for line in left_out(job, config, estimate) if line.startswith("the job may not fit")]
    for doubt in (*doubts, *only_for_accelerates_launcher(job)):
        typer.echo(f"warning: {doubt}", err=True)
    return estimate, config


def only_for_accelerates_launcher(job: ForeignJob) -> Iterator[str]:
    """A warning that ranks of torchrun do not read Accelerate's file, if the plan rests on it."""
    source = next((file for file in job.files if file.tool == "accelerate"), None)
    if source is None:
        return
    kind = str(source.values.get("distributed_type")).upper()
    flags = {"FSDP": "ACCELERATE_USE_FSDP=true", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED=true"}
    precision = source.values.get("mixed_precision")
    needed = [flags[kind]] if kind in flags else []
    if precision in ("fp16", "bf16") and all(file.tool != "trainer" for file in job.files):
        needed.append(f"ACCELERATE_MIXED_PRECISION={precision}")
    missing = [flag for flag in needed if os.environ.get(flag.partition("=")[0]) != flag.partition("=")[2]]
    if missing:
        yield (
            f"{source.name} is read by `accelerate launch` alone: the plan holds if the script says the same to "
            f"Accelerator(), or if the variables that `accelerate launch` sets are exported ({', '.join(missing)}, …)"
        )
