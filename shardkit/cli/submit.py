"""`shardkit submit`: check a job, and queue it on Slurm or print its manifest for Kubernetes."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, LaunchError, gib
from .program import Config, Count, Overrides, Program, RankOptions, RunDir, Text, Words, read_program, refuse_options
from .rehearse import card_of_cluster, rehearse_first

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..launch.slurm.submit import Submission
    from ..launch.spec import JobSpec, KubernetesOptions, SlurmOptions
    from ..plan.model.estimate import MemoryEstimate

_FOR_SLURM = (
    "partition", "account", "qos", "array", "dependency", "constraint", "exclude", "container_mounts", "style",
    "max_requeues", "signal_s", "sbatch",
)  # fmt: skip


@dataclass(frozen=True)
class ClusterOptions:
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes.")] = 1
    gpus_per_node: Annotated[int, typer.Option(metavar="N", help="GPUs, and ranks, on each node; 0 = CPU.")] = 8
    ranks_per_node: Annotated[Count, typer.Option(metavar="N", help="Default: one per GPU.")] = None
    time: Annotated[Text, typer.Option(metavar="H:MM:SS", help="Time limit.")] = None
    partition: Annotated[Text, typer.Option(metavar="NAME")] = None
    account: Annotated[Text, typer.Option(metavar="NAME")] = None
    qos: Annotated[Text, typer.Option(metavar="NAME")] = None
    array: Annotated[Text, typer.Option(metavar="0-3", help="One job per index; %a in an override is the index.")] = (
        None
    )
    dependency: Annotated[Text, typer.Option(metavar="afterok:JOB")] = None
    constraint: Annotated[Text, typer.Option(metavar="FEATURE")] = None
    exclude: Annotated[Text, typer.Option(metavar="NODES", help="Nodes to avoid.")] = None
    mem: Annotated[Text, typer.Option(metavar="SIZE", help="Host memory per node.")] = None
    cpus_per_task: Annotated[Count, typer.Option(metavar="N")] = None
    container: Annotated[Text, typer.Option(metavar="IMAGE", help="Run by pyxis, or the pods'.")] = None
    container_mounts: Annotated[
        Text, typer.Option(metavar="SRC:DST,…", help="Mounts besides the working and run directories.")
    ] = None
    style: Annotated[str, typer.Option(metavar="torchrun|srun", help="torchrun per node, or a task per rank.")] = (
        "torchrun"
    )
    name: Annotated[Text, typer.Option(metavar="NAME", help="Default: from the run directory.")] = None
    max_restarts: Annotated[int, typer.Option(metavar="K", help="torchrun's restarts after a rank failed.")] = 0
    max_requeues: Annotated[int, typer.Option(metavar="K", help="Preemptions and time limits to survive.")] = 100
    signal_s: Annotated[
        Count, typer.Option(metavar="S", help="Save S seconds before the limit; default: based on its saves so far.")
    ] = None
    sbatch: Annotated[
        Words, typer.Option(metavar="--OPTION=VALUE", help="Any other option of sbatch; may be repeated.")
    ] = None

    def check(self) -> None:
        for option in ("gpus_per_node", "max_restarts", "max_requeues"):
            if (number := getattr(self, option)) < 0:
                raise LaunchError(f"--{option.replace('_', '-')} {number} is negative", "pass 0 or more")
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise LaunchError(f"--cpus-per-task {self.cpus_per_task} is no number of CPUs", "pass 1 or more")
        if self.array is not None and not re.fullmatch(r"[\d,:%-]*\d", self.array):
            raise LaunchError(f"--array {self.array!r} is not a list of indices", "write it as 0-3, 1,5-9:2 or 0-9%2")
        for option in self.sbatch or []:
            if not option.startswith("-"):
                raise LaunchError(f"--sbatch {option!r} is not an option", f"write it as --sbatch=--{option}")
            if self.gpus_per_node and re.match(r"--gpus|-G", option):  # Slurm may give a node another number of them
                cause = f"--sbatch={option} contradicts --gpus-per-node {self.gpus_per_node}"
                raise LaunchError(cause, "pass --gpus-per-node alone: ranks share a node's GPUs, one each")
        if self.style not in ("torchrun", "srun"):
            raise LaunchError(f"--style {self.style!r} is not a way to start ranks", "pass torchrun or srun")
        if self.time is not None and self.time.startswith("-"):
            fix = "pass minutes, H:MM:SS, or DAYS-HOURS; 0 = unlimited"
            raise LaunchError(f"--time {self.time!r} is negative", fix)
        if self.signal_s is not None and self.signal_s < 1:
            raise LaunchError(f"--signal-s {self.signal_s} is not a number of seconds", "pass 1 or more")

    def slurm_options(self) -> SlurmOptions:
        from ..launch.spec import SlurmOptions

        of_slurm = {entry.name for entry in fields(SlurmOptions)}  # the options of both have one name
        same = {name: option for name, option in vars(self).items() if name in of_slurm}
        return SlurmOptions(**same, extra=tuple(self.sbatch or ()))

    def pod_options(self, manifest: ManifestOptions) -> KubernetesOptions:
        from ..launch.slurm.preemption_warning import limit_s
        from ..launch.spec import KubernetesOptions

        if self.time is not None and not limit_s(self.time):
            raise LaunchError(f"--time {self.time!r} is not a time limit", "pass minutes, H:MM:SS, or DAYS-HOURS")
        return KubernetesOptions(
            image=self.container, volumes=tuple(manifest.volume or ()),
            memory=_quantity(self.mem), cpus=None if self.cpus_per_task is None else str(self.cpus_per_task),
            limit_s=limit_s(self.time or ""), max_restarts=self.max_restarts,
        )  # fmt: skip


@dataclass(frozen=True)
class PlanOptions:
    gpu: Annotated[Text, typer.Option(metavar="NAME", help="Plan the job for the cluster's cards (h100, …).")] = None
    gpu_memory: Annotated[Text, typer.Option(metavar="80GB", help="Or for cards of this size.")] = None
    force: Annotated[bool, typer.Option("--force", help="Submit it even if it would not fit.")] = False
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="First rehearse it on emulated cards of --gpu; submit it if it fits.")
    ] = False


@dataclass(frozen=True)
class ManifestOptions:
    """Which kind of cluster takes the job, and options for Kubernetes alone."""

    to: Annotated[str, typer.Option("--to", metavar="slurm|kubernetes", help="kubernetes prints a manifest.")] = "slurm"
    volume: Annotated[
        Words, typer.Option(metavar="CLAIM:/PATH", help="Kubernetes: a volume claim to mount; may be repeated.")
    ] = None

    def check(self) -> None:
        if self.to == "jobset":
            raise LaunchError("--to jobset is written --to kubernetes now", "pass --to kubernetes: it prints a JobSet")
        if self.to not in ("slurm", "kubernetes"):
            raise LaunchError(f"--to {self.to!r} is not a kind of cluster", "pass one of slurm, kubernetes")


def submit(
    ctx: typer.Context,
    config: Config = None,
    overrides: Overrides = None,
    *,
    cluster: ClusterOptions,
    planning: PlanOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
    manifest: ManifestOptions,
    run_dir: RunDir = None,
    checkpoints: Annotated[
        Text, typer.Option(metavar="DIR", help="Where a script writes checkpoints; new files are its progress.")
    ] = None,
    ranks: RankOptions,
) -> None:
    """Queue CONFIG or a script on a cluster; it is checked first, and continues after preemptions and time limits.

    With --gpu or --gpu-memory, a config's memory is predicted too, and a job that cannot fit is not queued.
    With --rehearse the job runs on emulated cards first, and is queued only if it fits them.
    """
    from ..launch.slurm.submit import array_indices

    if planning.rehearse and planning.force:
        raise LaunchError("--force submits a job that does not fit, and --rehearse one that does", "remove one")
    manifest.check()
    program = read_program(ctx, config, overrides or [], ranks, run_dir, checkpoints)
    cluster.check()
    job = _prepare(program, cluster)
    card = card_of_cluster(job.spec, planning.gpu, planning.gpu_memory) if planning.rehearse else None
    # stdout is a script or a manifest in the second case
    plan = plan_first(program, job.spec, planning, cluster.mem, err=dry_run or manifest.to != "slurm")
    if card is not None:
        index = None if cluster.array is None else str(array_indices(cluster.array)[0])
        rehearse_first(program, job.spec, card, index)
    if manifest.to != "slurm":
        refuse_options(ctx, _FOR_SLURM, f"applies to Slurm, not to --to {manifest.to}", "remove it")
        from ..launch.kubernetes import render_job_set

        # The config or the run directory as it is named in the pods.
        dns_name = re.sub(r"[^a-z0-9-]+", "-", job.spec.name.lower()).strip("-")[:40].rstrip("-")
        spec = replace(job.spec, kubernetes=cluster.pod_options(manifest), name=cluster.name or dns_name)
        if program.script is None:
            spec = replace(spec, config=program.config, overrides=program.overrides, grace_s=ranks.grace_s)
        else:
            spec = replace(spec, run_dir=program.run_dir)
        typer.echo(render_job_set(spec), nl=False)
        return
    refuse_options(ctx, ("volume",), "applies to Kubernetes, not to Slurm", "remove it, or pass --to")
    if program.script is None:
        refuse_options(ctx, ("grace_s",), "applies to pods and to scripts; Slurm's KillWait decides here", "remove it")
    for doubt in job.doubts:
        typer.echo(f"warning: {doubt}", err=True)
    if dry_run:
        typer.echo(job.script, nl=False)
    else:
        _queue(program, job, cluster.array, plan)


def plan_first(
    program: Program, spec: JobSpec, options: PlanOptions, mem: str | None, err: bool
) -> tuple[MemoryEstimate, RunConfig] | None:
    """Plan a config's job if an option names its cards, and show the verdict; None where there is no plan."""
    if not (options.gpu or options.gpu_memory) or options.force or program.script is not None:
        return None
    from ..plan.advise import changes_that_fit
    from ..plan.client import Planner
    from ..plan.show import misfit, show_changes
    from ..plan.target import choose_target

    if not spec.gpus_per_node:
        raise ConfigError("--gpu asks for a plan, but the job asks for no GPU", "pass --gpus-per-node N, or no --gpu")
    # Slurm's sizes are binary: K, M, G, T; a plain number means MiB.
    host_memory = f"{mem}M" if mem is not None and mem.isdigit() else mem
    config, n_ranks = program.load().config, spec.nproc_per_node * spec.nodes[1]
    target = choose_target(config, n_ranks, spec.nproc_per_node, options.gpu, options.gpu_memory, host_memory)
    with Planner(target) as planner:
        estimate = planner.predict(config)
        if estimate.verdict == "does not fit":
            changes = changes_that_fit(config, estimate, planner)
            typer.echo(show_changes(changes), err=True)
            best = next((change.settings for change in changes if change.estimate.verdict != "does not fit"), None)
            fix = f"{best}, or submit it anyway with --force" if best else "use more or larger GPUs, or pass --force"
            raise ConfigError(misfit(estimate), fix)
    limit = gib(estimate.device_memory or 0)
    typer.echo(
        f"planned: {gib(estimate.needed)} of {limit} on each GPU: {estimate.verdict}{estimate.condition}", err=err
    )
    return estimate, config


def _prepare(program: Program, cluster: ClusterOptions) -> Submission:
    """The job of a program, checked for the cluster's nodes; writes nothing."""
    from ..launch.slurm.submit import Request, prepare, prepare_script

    request = Request(
        nodes=cluster.nodes, ranks_per_node=cluster.ranks_per_node or cluster.gpus_per_node or 1,
        gpus_per_node=cluster.gpus_per_node, max_restarts=cluster.max_restarts, name=cluster.name,
        options=cluster.slurm_options(),
    )  # fmt: skip
    if program.script is not None:
        return prepare_script(program.script, program.run_dir, request)
    program.load()  # an error here names another tool's file, which `prepare` does not know
    return prepare(str(program.config), program.overrides, request)


def _queue(program: Program, job: Submission, array: str | None, plan: tuple[MemoryEstimate, RunConfig] | None) -> None:
    from ..launch.slurm.submit import array_indices, held_back
    from ..launch.slurm.submit import submit as hand_to_sbatch

    job_id, folder = hand_to_sbatch(job, program.launch_command())
    run_dir = job.spec.run_dir
    if plan is not None:
        estimate, config = plan
        estimate.save(Path(run_dir), config)
    numbers = [f"_{index}" for index in array_indices(array)] if array else [""]
    outputs = [f"{run_dir}/logs/slurm-{job_id}{number}.out" for number in numbers]
    output = ", ".join(outputs) if len(outputs) < 4 else f"{outputs[0]} … {outputs[-1]}"
    typer.echo(f"submitted job {job_id}\n  output:   {output}\n  snapshot: {folder}")
    followed = shlex.join(outputs if len(outputs) < 4 else outputs[:1])
    typer.echo(f"  state:    squeue --jobs {job_id}\n  follow:   tail -F {followed}\n  end it:   scancel {job_id}")
    if reason := held_back(job_id):
        typer.echo(f"warning: Slurm holds it back: {reason}", err=True)


def _quantity(size: str | None) -> str | None:
    """Slurm's size (`64G`, binary; a plain number means MiB) as Kubernetes writes it: `64Gi`."""
    if size is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)(?:([KMGT])(iB?|B)?)?", size)
    if match is None:
        raise LaunchError(f"--mem {size!r} is not a size", "write a whole number and a unit: 64G, 64GiB, 64GB")
    number, unit, form = match.groups()
    # "64GB" is decimal, as in a plan.
    return f"{number}{'k' if unit == 'K' else unit}" if form == "B" else f"{number}{unit or 'M'}i"
