"""The commands that start jobs: `shardkit launch`, `submit`, `jobs`, `logs`, `cancel`, `doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from ..config.load import LoadedConfig
    from ..config.schema import RunConfig
    from ..launch.spec import JobSpec
    from ..plan.model.estimate import MemoryEstimate

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file of the run; - for defaults.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads it at run time on Python 3.10
    typer.Argument(metavar="[section.key=value]...", help="Overrides the file's value."),
]


def launch(
    config: Config,
    overrides: Overrides = None,
    nproc_per_node: Annotated[
        str, typer.Option("--nproc-per-node", metavar="N", help="Ranks on this node; auto = one per GPU.")
    ] = "auto",
    nnodes: Annotated[str, typer.Option(metavar="N|MIN:MAX", help="Nodes; a range makes the job elastic.")] = "1",
    max_restarts: Annotated[int, typer.Option(metavar="K", help="Restarts after a rank failed.")] = 0,
    rdzv_endpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="HOST:PORT", help="Where several nodes meet; not needed in a Slurm step."),
    ] = None,
    rdzv_id: Annotated[str, typer.Option(metavar="ID", help="The same on every node of a job.")] = "shardkit",
    rdzv_conf: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="For torchrun's rendezvous, e.g. last_call_timeout=10.")
    ] = "",
    bind_cpus: Annotated[bool, typer.Option(help="Divide the CPUs among the ranks.")] = True,
) -> None:
    """Train CONFIG with torchrun: rank 0 on the terminal, every rank's log in the run directory."""
    from ..launch.local import torchrun
    from ..launch.local.launcher import launch as run
    from ..launch.ranks.gpus import ranks_per_node, visible_gpus
    from ..launch.spec import JobSpec, Rendezvous, parse_nnodes

    loaded = _load(config, overrides or [])
    spec = JobSpec(
        config=None if config == "-" else config,
        overrides=tuple(overrides or ()),
        run_dir=loaded.config.run.dir,
        nproc_per_node=ranks_per_node(nproc_per_node, loaded.config.run.device),
        nodes=parse_nnodes(nnodes),
        max_restarts=max_restarts,
        python=sys.executable,
        rendezvous=Rendezvous(endpoint=rdzv_endpoint, run_id=rdzv_id, conf=rdzv_conf),
        bind_cpus=bind_cpus,
        on_gpus=loaded.config.run.device != "cpu" and visible_gpus() > 0,
    )
    torchrun.check_elastic(spec, loaded.config)
    raise typer.Exit(run(spec, rendezvous_timeout_s=loaded.config.run.init_timeout_s))


def submit(
    config: Config,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", help="GPUs, and ranks, on each node; 0 = CPU.")] = 8,
    ranks_per_node: Annotated[Optional[int], typer.Option(metavar="N", help="Default: one per GPU.")] = None,  # noqa: UP045
    time: Annotated[Optional[str], typer.Option(metavar="H:MM:SS", help="Time limit.")] = None,  # noqa: UP045
    partition: Annotated[Optional[str], typer.Option(metavar="NAME")] = None,  # noqa: UP045
    account: Annotated[Optional[str], typer.Option(metavar="NAME")] = None,  # noqa: UP045
    qos: Annotated[Optional[str], typer.Option(metavar="NAME")] = None,  # noqa: UP045
    array: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="0-3", help="One job per index; %a in an override is the index."),
    ] = None,
    dependency: Annotated[Optional[str], typer.Option(metavar="afterok:JOB")] = None,  # noqa: UP045
    constraint: Annotated[Optional[str], typer.Option(metavar="FEATURE")] = None,  # noqa: UP045
    exclude: Annotated[Optional[str], typer.Option(metavar="NODES", help="Nodes to avoid.")] = None,  # noqa: UP045
    mem: Annotated[Optional[str], typer.Option(metavar="SIZE", help="Host memory per node.")] = None,  # noqa: UP045
    cpus_per_task: Annotated[Optional[int], typer.Option(metavar="N")] = None,  # noqa: UP045
    container: Annotated[Optional[str], typer.Option(metavar="IMAGE", help="Run by pyxis.")] = None,  # noqa: UP045
    container_mounts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="SRC:DST,…", help="Mounts besides the working and run directories."),
    ] = None,
    style: Annotated[
        str, typer.Option(metavar="torchrun|srun", help="torchrun per node, or a task per rank.")
    ] = "torchrun",
    name: Annotated[Optional[str], typer.Option(metavar="NAME", help="Default: from the run directory.")] = None,  # noqa: UP045
    max_restarts: Annotated[int, typer.Option(metavar="K", help="torchrun's restarts after a rank failed.")] = 0,
    max_requeues: Annotated[int, typer.Option(metavar="K", help="Preemptions and time limits to survive.")] = 100,
    signal_s: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="S", help="Save S seconds before the limit; default: based on its saves so far."),
    ] = None,
    sbatch: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="--OPTION=VALUE", help="Any other option of sbatch; may be repeated."),
    ] = None,
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Plan the job for the cluster's cards (h100, …)."),
    ] = None,
    gpu_memory: Annotated[Optional[str], typer.Option(metavar="80GB", help="Or for cards of this size.")] = None,  # noqa: UP045
    force: Annotated[bool, typer.Option("--force", help="Submit it even if it would not fit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
) -> None:
    """Queue CONFIG on a Slurm cluster; it is checked first, and continues after preemptions and time limits.

    With --gpu or --gpu-memory, its memory is predicted too, and a job that cannot fit is not queued.
    """
    from ..errors import LaunchError
    from ..launch.slurm import queue
    from ..launch.slurm import submit as launcher
    from ..launch.spec import SlurmOptions

    if style not in ("torchrun", "srun"):
        raise LaunchError(f"--style {style!r}", "pass torchrun or srun")
    options = SlurmOptions(
        style=style, time=time, partition=partition, account=account, qos=qos, array=array, dependency=dependency,
        constraint=constraint, mem=mem, exclude=exclude, cpus_per_task=cpus_per_task, container=container,
        container_mounts=container_mounts, signal_s=signal_s, max_requeues=max_requeues, extra=tuple(sbatch or ()),
    )  # fmt: skip
    job = launcher.prepare(
        config, overrides or [], nodes=nodes, gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node or gpus_per_node or 1, max_restarts=max_restarts, name=name, options=options,
    )  # fmt: skip
    planned = None
    if (gpu or gpu_memory) and not force:
        planned = _planned(config, overrides or [], job.spec, gpu, gpu_memory, mem)
    for doubt in job.doubts:
        typer.echo(f"warning: {doubt}", err=True)
    if dry_run:
        typer.echo(job.script, nl=False)
        return
    job_id, folder = launcher.submit(job)
    if planned is not None:
        estimate, loaded = planned
        estimate.save(Path(job.spec.run_dir), loaded)
    output = f"{job.spec.run_dir}/logs/slurm-{job_id}{'_%a' if array else ''}.out"
    typer.echo(f"submitted job {job_id}\n  output:   {output}\n  snapshot: {folder}")
    typer.echo(f"  follow:   shardkit logs -f {job_id}\n  end it:   shardkit cancel {job_id}")
    held = queue.held_back(job_id)
    if held:
        typer.echo(f"warning: Slurm holds it back: {held}", err=True)


def _planned(
    config: str, overrides: list[str], spec: JobSpec, gpu: str | None, gpu_memory: str | None, mem: str | None
) -> tuple[MemoryEstimate, RunConfig]:
    """Plan the job, without overrides that hold an array's index; returns the estimate and the planned config."""
    from ..errors import ConfigError, gib
    from ..plan.submit_check import refuse_misfit
    from ..plan.target import choose_target

    if not spec.gpus_per_node:
        raise ConfigError("--gpu asks for a plan, but the job asks for no GPU", "pass --gpus-per-node N, or no --gpu")
    fixed = [item for item in overrides if "%a" not in item]
    ranks = spec.nproc_per_node * spec.nodes[1]
    loaded = _load(config, fixed).config
    # Slurm's sizes are binary: K, M, G, T; a plain number means MiB.
    on_host = None if mem is None else f"{mem}M" if mem.isdigit() else mem
    target = choose_target(loaded, ranks, spec.nproc_per_node, gpu, gpu_memory, on_host)
    estimate = refuse_misfit(lambda more: _load(config, [*fixed, *more]).config, target)
    typer.echo(f"planned: {gib(estimate.needed)} of {gib(target.device_memory or 0)} on each GPU: {estimate.verdict}")
    return estimate, loaded


def jobs() -> None:
    """List the jobs that were submitted here and have not ended."""
    from ..launch.slurm import queue

    typer.echo(queue.table(queue.jobs()))


Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id.")]


def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or a run directory.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow it until the job ends.")] = False,
) -> None:
    """Print a job's output."""
    from ..launch.slurm import queue

    try:
        queue.show_logs(job, follow)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def cancel(job: Job) -> None:
    """End a job; its checkpoints stay."""
    from ..launch.slurm import queue

    typer.echo(queue.cancel(job))


def doctor(
    run_dir: Annotated[str, typer.Option("--run-dir", metavar="DIR", help="Check this directory's disk.")] = "runs",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Keep the measured constants for planning.")] = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device to measure.")] = "auto",
) -> None:
    """Look for problems that make training fail or crawl; under torchrun or srun also measure the ranks together."""
    from ..errors import LaunchError
    from ..hardware import calibration
    from ..launch.doctor import finding
    from ..launch.doctor.examine import examine
    from ..launch.ranks.env import detect

    try:
        env = detect()
    except LaunchError:  # `examine` reports it as a finding
        env = None
    measured = None
    if calibrate or (env is not None and env.world_size > 1):
        from ..hardware import collectives

        loaded = _load("-", [f"run.device={device}", f"run.dir={run_dir}"])
        measured = collectives.measure(loaded.config)
        if measured is None:
            return
        if calibrate:
            calibration.save(measured[1])
    checks = examine(Path(run_dir), calibration.cache_dir()) + (measured[0] if measured else [])
    extra = {"measured": measured[1]} if measured else {}
    typer.echo(finding.as_json(checks, extra) if json_output else finding.render(checks))
    raise typer.Exit(1 if finding.worst(checks) == "fail" else 0)


def _load(config: str, overrides: list[str]) -> LoadedConfig:
    from ..config.load import load_config

    return load_config(None if config == "-" else config, overrides)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the `shardkit` command."""
    for command in (launch, submit, jobs, logs, cancel, doctor):
        app.command()(command)
