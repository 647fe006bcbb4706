"""The commands that start jobs: `shardkit launch`, `submit`, `jobs`, `logs`, `cancel`, `doctor`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from .plan import Model, Peft

if TYPE_CHECKING:
    from ..config.foreign.translate import Job as TheirJob
    from ..config.load import LoadedConfig
    from ..config.schema import RunConfig
    from ..launch.script import Script
    from ..launch.spec import JobSpec
    from ..plan.model.estimate import MemoryEstimate

_SCRIPT = "shardkit.script"  # the key of the words after `--` in a command's context
_OWN = "shardkit.own"  # and of those before it
_FOR_CONFIGS = ("bind_cpus", "gpu", "gpu_memory", "force")
_FOR_SLURM = (
    "partition", "account", "qos", "array", "dependency", "constraint", "exclude", "container_mounts", "style",
    "max_requeues", "signal_s", "sbatch",
)  # fmt: skip
UsageError: Any = typer.BadParameter.__base__


class JobCommand(TyperCommand):
    """A command whose words after `--` are a script and its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set the words after `--` aside, and read the others.

        Raises:
            LaunchError: a script without `--` before it, whose own options are no options here.
        """
        from ..errors import LaunchError

        own = args[: args.index("--")] if "--" in args else list(args)
        ctx.meta[_OWN], ctx.meta[_SCRIPT] = own, args[len(own) + 1 :] if len(own) < len(args) else None
        try:
            return list(super().parse_args(ctx, list(own)))
        except UsageError as error:
            program = _program_in(own)
            if ctx.meta[_SCRIPT] is not None or program is None:
                raise
            raise LaunchError(*_forgotten(self.name, own, program)) from error


def _program_in(words: Sequence[str]) -> int | None:
    """Where a script or `-m` stands among words that should be a config and its overrides."""
    return next((i for i, word in enumerate(words) if word == "-m" or re.fullmatch(r"[^=]+\.py", word)), None)


def _forgotten(command: str | None, words: Sequence[str], program: int) -> tuple[str, str]:
    import shlex

    shown = " ".join(["shardkit", command or "", *words[:program], "--", *map(shlex.quote, words[program:])])
    return f"{words[program]} is not a config: a script stands behind `--`", shown


def _script(
    ctx: typer.Context, config: str | None, overrides: Sequence[str], grace_s: float | None, **options: Any
) -> Script | None:
    """The script behind `--`, checked; None for a config.

    Raises:
        LaunchError: both or neither, a script that cannot start, or an option that does not apply.
    """
    from ..errors import LaunchError
    from ..launch import script as scripts

    words, command = ctx.meta[_SCRIPT], str(ctx.info_name)
    if words is None:
        if config is None:
            how = f"shardkit {command} CONFIG, or shardkit {command} [options] -- train.py arguments"
            raise LaunchError("neither a config nor a script was given", how)
        if _program_in([config]) is not None:
            own = ctx.meta[_OWN]
            raise LaunchError(*_forgotten(command, own, own.index(config)))
        _refuse_options(ctx, options, "applies to a script behind `--`, and this is a config", "remove it")
        scripts.check_grace(0 if grace_s is None else grace_s)
        return None
    if config is not None:
        both = f"both a config ({config}) and a script ({' '.join(words[:2])}) were given"
        raise LaunchError(both, "remove one of them; the script's own arguments follow its name")
    _refuse_options(ctx, _FOR_CONFIGS[:1], "applies to a config, and this is a script", "remove it")
    if not ctx.params.get("theirs"):
        files = "add --from with the files of its trainer and --model, or remove it"
        _refuse_options(ctx, _FOR_CONFIGS[1:], "plans a config, and this is a script", files)
    if options["heartbeat"] is None:
        said = "says how long --heartbeat may be silent, which is not given"
        _refuse_options(ctx, ("heartbeat_timeout",), said, "pass --heartbeat auto or FILE too")
    script = scripts.Script(
        argv=tuple(words), on_preempt=options["on_preempt"], heartbeat=options["heartbeat"],
        heartbeat_timeout_s=options["heartbeat_timeout"], checkpoints=options.get("checkpoints"),
        **({} if grace_s is None else {"grace_s": grace_s}),
    )  # fmt: skip
    scripts.check(script, None if ctx.params.get("to", "slurm") != "slurm" else Path.cwd())
    return script


def _refuse_options(ctx: typer.Context, names: Any, why: str, fix: str) -> None:
    from ..errors import LaunchError

    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise LaunchError(f"--{name.replace('_', '-')} {why}", fix)


Config = Annotated[
    Optional[str],  # noqa: UP045 - typer reads it at run time on Python 3.10
    typer.Argument(metavar="CONFIG | -- SCRIPT", help="The YAML file of the run, - for defaults; or your own script."),
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(metavar="[section.key=value]...", help="Overrides the file's value."),
]
RunDir = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--run-dir", metavar="DIR", help="A script's logs go there; default: runs/SCRIPT."),
]
OnPreempt = Annotated[
    str, typer.Option(metavar="term|usr1|usr2|file", help="How a script learns that its job is preempted.")
]
Heartbeat = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="auto|FILE", help="A script's ranks that stop touching it are ended as hung."),
]
HeartbeatTimeout = Annotated[float, typer.Option(metavar="S", help="Seconds without a heartbeat.")]
Grace = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--grace-s", metavar="S", help="The ranks' time to save and end after SIGTERM."),
]


def launch(
    ctx: typer.Context,
    config: Config = None,
    overrides: Overrides = None,
    nproc_per_node: Annotated[
        str, typer.Option("--nproc-per-node", metavar="N", help="Ranks on this node; auto = one per GPU.")
    ] = "auto",
    nnodes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="N|MIN:MAX", help="Nodes, 1 by default; a range makes the job elastic."),
    ] = None,
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
    run_dir: RunDir = None,
    on_preempt: OnPreempt = "term",
    heartbeat: Heartbeat = None,
    heartbeat_timeout: HeartbeatTimeout = 600.0,
    grace_s: Grace = None,
) -> None:
    """Run CONFIG or a script with torchrun: rank 0 on the terminal, every rank's log in the run directory."""
    from ..launch import kubernetes
    from ..launch.local import run_dir as run_dirs
    from ..launch.local import torchrun
    from ..launch.local.launcher import launch as run
    from ..launch.ranks.gpus import ranks_per_node, visible_gpus
    from ..launch.spec import JobSpec, Rendezvous, parse_nnodes

    script = _script(
        ctx, config, overrides or [], grace_s, run_dir=run_dir, on_preempt=on_preempt, heartbeat=heartbeat,
        heartbeat_timeout=heartbeat_timeout,
    )  # fmt: skip
    nnodes, nproc_per_node = kubernetes.sizes(os.environ, nnodes, nproc_per_node)
    loaded = None if script is not None else _load(str(config), overrides or []).config
    device = "auto" if loaded is None else loaded.run.device
    spec = JobSpec(
        config=None if config == "-" else config,
        overrides=tuple(overrides or ()),
        run_dir=loaded.run.dir if loaded is not None else _run_dir(run_dir, script),
        nproc_per_node=ranks_per_node(nproc_per_node, device),
        nodes=parse_nnodes(nnodes),
        max_restarts=max_restarts,
        python=sys.executable,
        rendezvous=Rendezvous(endpoint=rdzv_endpoint, run_id=rdzv_id, conf=rdzv_conf),
        bind_cpus=bind_cpus and script is None,
        on_gpus=device != "cpu" and visible_gpus() > 0,
        script=script,
        grace_s=grace_s if script is None else None,
    )
    torchrun.check_elastic(spec, loaded)
    if loaded is not None and not run_dirs.has_run(path := Path(loaded.run.dir)):
        run_dirs.refuse_without_run(path, loaded.run.resume)
    torchrun.check_ranks(spec, loaded)
    raise typer.Exit(run(spec, rendezvous_timeout_s=600 if loaded is None else loaded.run.init_timeout_s))


def _run_dir(asked: str | None, script: Script | None) -> str:
    return asked or os.path.join("runs", script.name if script is not None else "script")


def submit(
    ctx: typer.Context,
    config: Config = None,
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
    container: Annotated[Optional[str], typer.Option(metavar="IMAGE", help="Run by pyxis, or the pods'.")] = None,  # noqa: UP045
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
    theirs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--from", metavar="FILE", help="Plan a script by another tool's file; may be repeated."),
    ] = None,
    model: Model = None,
    peft: Peft = None,
    force: Annotated[bool, typer.Option("--force", help="Submit it even if it would not fit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
    to: Annotated[
        str, typer.Option("--to", metavar="slurm|kubernetes|jobset", help="The last two print a manifest.")
    ] = "slurm",
    volume: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="CLAIM:/PATH", help="Kubernetes: a volume claim to mount; may be repeated."),
    ] = None,
    runtime: Annotated[str, typer.Option(metavar="NAME", help="Kubeflow's training runtime.")] = "torch-distributed",
    run_dir: RunDir = None,
    checkpoints: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="DIR", help="Where a script writes checkpoints; new files are its progress."),
    ] = None,
    on_preempt: OnPreempt = "term",
    heartbeat: Heartbeat = None,
    heartbeat_timeout: HeartbeatTimeout = 600.0,
    grace_s: Grace = None,
) -> None:
    """Queue CONFIG or a script on a cluster; it is checked first, and continues after preemptions and time limits.

    With --gpu or --gpu-memory, a config's memory is predicted too, and a job that cannot fit is not queued. So is a
    script's with --from, by its files of Accelerate, DeepSpeed or transformers' Trainer.
    """
    from ..errors import LaunchError
    from ..launch.cluster import choose
    from ..launch.slurm import queue
    from ..launch.slurm import submit as launcher
    from ..launch.slurm.preemption_warning import limit_s
    from ..launch.spec import KubernetesOptions, SlurmOptions

    cluster = choose(to)
    described = None
    if theirs or model or peft:
        described = _described(ctx, config, overrides or [], theirs or [], model, peft)
        config, overrides = None, None
    script = _script(
        ctx, config, overrides or [], grace_s, run_dir=run_dir, on_preempt=on_preempt, heartbeat=heartbeat,
        heartbeat_timeout=heartbeat_timeout, checkpoints=checkpoints,
    )  # fmt: skip
    if style not in ("torchrun", "srun"):
        raise LaunchError(f"--style {style!r}", "pass torchrun or srun")
    if max_requeues < 0:
        raise LaunchError(f"--max-requeues {max_requeues} is negative", "pass 0 or more")
    if time is not None and time.startswith("-"):
        raise LaunchError(f"--time {time!r} is negative", "pass minutes, H:MM:SS, or DAYS-HOURS; 0 = unlimited")
    if signal_s is not None and signal_s < 1:
        raise LaunchError(f"--signal-s {signal_s} is not a number of seconds before the limit", "pass 1 or more")
    options = SlurmOptions(
        style=style, time=time, partition=partition, account=account, qos=qos, array=array, dependency=dependency,
        constraint=constraint, mem=mem, exclude=exclude, cpus_per_task=cpus_per_task, container=container,
        container_mounts=container_mounts, signal_s=signal_s, max_requeues=max_requeues, extra=tuple(sbatch or ()),
    )  # fmt: skip
    sizes: dict[str, Any] = dict(
        nodes=nodes, gpus_per_node=gpus_per_node, ranks_per_node=ranks_per_node or gpus_per_node or 1,
        max_restarts=max_restarts, name=name, options=options,
    )  # fmt: skip
    if script is not None:
        job = launcher.prepare_script(script, _run_dir(run_dir, script), **sizes)
    else:
        job = launcher.prepare(str(config), overrides or [], **sizes)
    planned = None
    if (gpu or gpu_memory) and not force:
        if described is not None:
            planned = _planned_by_files(described, job.spec, gpu, gpu_memory, mem)
        else:
            planned = _planned(str(config), overrides or [], job.spec, gpu, gpu_memory, mem)
        typer.echo(_verdict(planned[0]), err=dry_run or to != "slurm")  # stdout is then a script or a manifest
    if to != "slurm":
        _refuse_options(ctx, _FOR_SLURM, f"applies to Slurm, not to --to {to}", "remove it")
        if time is not None and not limit_s(time):
            raise LaunchError(f"--time {time!r} is not a time limit", "pass minutes, H:MM:SS, or DAYS-HOURS")
        pods = KubernetesOptions(
            image=container, runtime=runtime, volumes=tuple(volume or ()), memory=_quantity(mem),
            cpus=None if cpus_per_task is None else str(cpus_per_task), limit_s=limit_s(time or ""),
            max_restarts=max_restarts,
        )  # fmt: skip
        spec = replace(job.spec, kubernetes=pods, name=name or _dns_name(job.spec.name))
        if script is None:
            spec = replace(spec, config=config, overrides=tuple(overrides or ()), grace_s=grace_s)
        else:
            spec = replace(spec, run_dir=_run_dir(run_dir, script))
        typer.echo(cluster.render(spec), nl=False)
        return
    _refuse_options(ctx, ("volume", "runtime"), "applies to Kubernetes, not to Slurm", "remove it, or pass --to")
    if script is None:
        _refuse_options(ctx, ("grace_s",), "applies to pods and to scripts; Slurm's KillWait decides here", "remove it")
    for doubt in job.doubts:
        typer.echo(f"warning: {doubt}", err=True)
    if dry_run:
        typer.echo(job.script, nl=False)
        return
    job_id, folder = launcher.submit(job, _launched_here(script, config, overrides or [], run_dir))
    if planned is not None:
        estimate, loaded = planned
        estimate.save(Path(job.spec.run_dir), loaded)
    numbers = [f"_{index}" for index in launcher.array_indices(array)] if array else [""]
    outputs = [f"{job.spec.run_dir}/logs/slurm-{job_id}{number}.out" for number in numbers]
    output = ", ".join(outputs) if len(outputs) < 4 else f"{outputs[0]} … {outputs[-1]}"
    typer.echo(f"submitted job {job_id}\n  output:   {output}\n  snapshot: {folder}")
    typer.echo(f"  follow:   shardkit logs -f {job_id}\n  end it:   shardkit cancel {job_id}")
    held = queue.held_back(job_id)
    if held:
        typer.echo(f"warning: Slurm holds it back: {held}", err=True)


def _launched_here(script: Script | None, config: str | None, overrides: Sequence[str], run_dir: str | None) -> str:
    """The command that trains the same on this machine."""
    import shlex

    if script is None:
        return shlex.join(["shardkit", "launch", str(config), *(item for item in overrides if "%a" not in item)])
    logs = [] if run_dir is None else ["--run-dir", run_dir]
    return shlex.join(["shardkit", "launch", *logs, "--", *script.argv])


def _quantity(size: str | None) -> str | None:
    """Slurm's size (`64G`, binary; a plain number means MiB) as Kubernetes writes it: `64Gi`.

    Raises:
        LaunchError: it is no size.
    """
    from ..errors import LaunchError

    if size is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)(?:([KMGT])(iB?|B)?)?", size)
    if found is None:
        raise LaunchError(f"--mem {size!r} is not a size", "write a whole number and a unit: 64G, 64GiB, 64GB")
    number, unit, form = found.groups()
    if form == "B":  # decimal, as in a plan
        return f"{number}{'k' if unit == 'K' else unit}"
    return f"{number}{unit or 'M'}i"


def _dns_name(name: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:40].rstrip("-")


def _planned(
    config: str, overrides: list[str], spec: JobSpec, gpu: str | None, gpu_memory: str | None, mem: str | None
) -> tuple[MemoryEstimate, RunConfig]:
    """Plan the job, without overrides that hold an array's index; returns the estimate and the planned config."""
    from ..plan.submit_check import refuse_misfit
    from ..plan.target import choose_target

    _refuse_no_gpu(spec)
    fixed = [item for item in overrides if "%a" not in item]
    ranks = spec.nproc_per_node * spec.nodes[1]
    loaded = _load(config, fixed).config
    target = choose_target(loaded, ranks, spec.nproc_per_node, gpu, gpu_memory, _on_host(mem))
    estimate = refuse_misfit(lambda more: _load(config, [*fixed, *more]).config, target)
    return estimate, loaded


def _verdict(estimate: MemoryEstimate) -> str:
    from ..errors import gib

    return f"planned: {gib(estimate.needed)} of {gib(estimate.device_memory or 0)} on each GPU: {estimate.verdict}"


def _refuse_no_gpu(spec: JobSpec) -> None:
    from ..errors import ConfigError

    if not spec.gpus_per_node:
        raise ConfigError("--gpu asks for a plan, but the job asks for no GPU", "pass --gpus-per-node N, or no --gpu")


def _on_host(mem: str | None) -> str | None:
    """Slurm's sizes are binary: K, M, G, T; a plain number means MiB."""
    return None if mem is None else f"{mem}M" if mem.isdigit() else mem


@dataclass(frozen=True)
class _Described:
    """What --from says of a script: files, settings that no file has, model and adapter."""

    files: list[str]
    settings: list[str]
    model: str | None
    peft: str | None


def _described(
    ctx: typer.Context, config: str | None, overrides: list[str], theirs: list[str], model: str | None,
    peft: str | None,
) -> _Described:  # fmt: skip
    """The files of a script's job and its settings, among the words before `--`.

    Raises:
        LaunchError: there is no script, no file, or no card to plan for.
    """
    from ..errors import LaunchError

    if not theirs:
        option = "--model" if model else "--peft"
        raise LaunchError(f"{option} belongs to --from, which is missing", "add --from with the files of the trainer")
    words = [*([] if config is None else [config]), *overrides]
    program = _program_in(words)
    if ctx.meta[_SCRIPT] is None:
        if program is not None:
            own = ctx.meta[_OWN]
            raise LaunchError(*_forgotten(ctx.info_name, own, own.index(words[program])))
        raise LaunchError(
            "--from describes the job of a script, and none is given",
            "name it behind `--`: shardkit submit --from FILE --model DIR --gpu h100 -- train.py arguments",
        )
    if config == "-":
        raise LaunchError("both --from and a config (-) were given", "remove one of them")
    if not (ctx.params["gpu"] or ctx.params["gpu_memory"]):
        raise LaunchError(
            "--from says what to plan, but nothing says for which cards",
            "add --gpu NAME or --gpu-memory SIZE, or remove --from",
        )
    files = [word for word in words if "=" not in word]  # --from a.yaml b.json: the second is a file too
    return _Described([*theirs, *files], [word for word in words if "=" in word], model, peft)


def _planned_by_files(
    asked: _Described, spec: JobSpec, gpu: str | None, gpu_memory: str | None, mem: str | None
) -> tuple[MemoryEstimate, RunConfig]:
    """Plan a script's job by the files of its trainer: its steps, its loading and its saving.

    Raises:
        ConfigError: it does not fit, or the files leave something open.
        NotPlannedError: a key of the files changes memory, and no plan models it.
    """
    from ..config.foreign.translate import read_job
    from ..errors import ConfigError
    from ..plan.submit_check import refuse_their_misfit
    from ..plan.target import choose_target
    from .foreign import OVERRIDES, left_out, misfits, moments

    _refuse_no_gpu(spec)
    ranks = spec.nproc_per_node * spec.nodes[1]
    job = read_job(asked.files, asked.model, ranks, asked.peft, [item for item in asked.settings if "%a" not in item])
    overrides = [*OVERRIDES, *(item for item in asked.settings if "%a" not in item)]
    job.refuse_unplanned("submit it anyway with --force")
    loaded = job.load(overrides).config
    target = choose_target(
        loaded, job.gpus, spec.nproc_per_node, gpu, gpu_memory, _on_host(mem), expandable=job.expandable
    )
    estimate = refuse_their_misfit(job, overrides, target)
    beside = list(misfits(moments(job, loaded, estimate), estimate, target.ranks_per_node))
    if beside:
        cause, fix = beside[0], next((line.strip().removeprefix("fix: ") for line in beside[1:2]), "")
        raise ConfigError(cause, f"{fix or 'use more or larger GPUs'}, or submit it anyway with --force")
    doubts = [line for line in left_out(job, loaded, estimate) if line.startswith("the job may not fit")]
    doubts += _only_for_accelerates_launcher(job)
    for doubt in doubts:
        typer.echo(f"warning: {doubt}", err=True)
    return estimate, loaded


def _only_for_accelerates_launcher(job: TheirJob) -> Iterator[str]:
    """A warning that ranks of torchrun do not read Accelerate's file, if the plan rests on it."""
    found = next((file for file in job.files if file.tool == "accelerate"), None)
    if found is None:
        return
    kind = str(found.values.get("distributed_type")).upper()
    flags = {"FSDP": "ACCELERATE_USE_FSDP=true", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED=true"}
    half = found.values.get("mixed_precision")
    needed = [flags[kind]] if kind in flags else []
    if half in ("fp16", "bf16") and all(file.tool != "trainer" for file in job.files):
        needed.append(f"ACCELERATE_MIXED_PRECISION={half}")
    missing = [one for one in needed if os.environ.get(one.partition("=")[0]) != one.partition("=")[2]]
    if missing:
        yield (
            f"{found.name} is read by `accelerate launch` alone: the plan holds if the script says the same to "
            f"Accelerator(), or if the variables that `accelerate launch` sets are exported ({', '.join(missing)}, …)"
        )


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
    for command in (launch, submit):
        app.command(cls=JobCommand)(command)
    for other in (jobs, logs, cancel, doctor):
        app.command()(other)
