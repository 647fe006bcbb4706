"""`shardkit launch`: run a config or a script with torchrun."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .program import Config, Overrides, RankOptions, RunDir, Text, load, read_program
from .rehearse import RehearseHere, card_here, rehearse_first


@dataclass(frozen=True)
class TorchrunOptions:
    """How many ranks and nodes torchrun starts, and where the nodes meet."""

    nproc_per_node: Annotated[
        str, typer.Option("--nproc-per-node", metavar="N", help="Ranks on this node; auto = one per GPU.")
    ] = "auto"
    nnodes: Annotated[
        Text, typer.Option(metavar="N|MIN:MAX", help="Nodes, 1 by default; a range makes the job elastic.")
    ] = None
    max_restarts: Annotated[int, typer.Option(metavar="K", help="Restarts after a rank failed.")] = 0
    rdzv_endpoint: Annotated[
        Text, typer.Option(metavar="HOST:PORT", help="Where several nodes meet; not needed in a Slurm step.")
    ] = None
    rdzv_id: Annotated[str, typer.Option(metavar="ID", help="The same on every node of a job.")] = "shardkit"
    rdzv_conf: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="For torchrun's rendezvous, e.g. last_call_timeout=10.")
    ] = ""


def launch(
    ctx: typer.Context,
    config: Config = None,
    overrides: Overrides = None,
    *,
    torchrun: TorchrunOptions,
    rehearsal: RehearseHere,
    bind_cpus: Annotated[bool, typer.Option(help="Divide the CPUs among the ranks.")] = True,
    run_dir: RunDir = None,
    ranks: RankOptions,
) -> None:
    """Run CONFIG or a script with torchrun: rank 0 on the terminal, every rank's log in the run directory.

    With --rehearse it runs on emulated cards first, and starts only if it fits them.
    """
    from ..launch import kubernetes
    from ..launch.local import restart as run_dirs
    from ..launch.local.launcher import check_elastic, check_ranks
    from ..launch.local.launcher import launch as run
    from ..launch.ranks.env import ranks_per_node, visible_gpus
    from ..launch.spec import JobSpec, Rendezvous, parse_nnodes

    rehearsal.check(ctx)
    program = read_program(ctx, config, overrides or [], ranks, run_dir)
    nnodes, nproc_per_node = kubernetes.sizes(os.environ, torchrun.nnodes, torchrun.nproc_per_node)
    run_config = None if program.script is not None else load(str(config), overrides or []).config
    device = "auto" if run_config is None else run_config.run.device
    spec = JobSpec(
        config=None if config == "-" else config,
        overrides=program.overrides,
        run_dir=program.run_dir if run_config is None else run_config.run.dir,
        nproc_per_node=ranks_per_node(nproc_per_node, device),
        nodes=parse_nnodes(nnodes),
        max_restarts=torchrun.max_restarts,
        python=sys.executable,
        rendezvous=Rendezvous(endpoint=torchrun.rdzv_endpoint, run_id=torchrun.rdzv_id, conf=torchrun.rdzv_conf),
        bind_cpus=bind_cpus and program.script is None,
        on_gpus=device != "cpu" and visible_gpus() > 0,
        script=program.script,
        grace_s=ranks.grace_s if program.script is None else None,
    )
    check_elastic(spec, run_config)
    if run_config is not None and not run_dirs.has_run(path := Path(run_config.run.dir)):
        run_dirs.refuse_without_run(path, run_config.run.resume)
    check_ranks(spec, run_config)
    if rehearsal.rehearse:
        rehearse_first(program, spec, card_here(run_config or load("-", []).config, spec, rehearsal))
    raise typer.Exit(run(spec, rendezvous_timeout_s=600 if run_config is None else run_config.run.init_timeout_s))
