"""`launch --rehearse` and `submit --rehearse`: a job starts only after its program fitted emulated cards."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, LaunchError
from .program import Program, Text, refuse_options

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..hardware.cards import Gpu
    from ..launch.spec import JobSpec
    from ..plan.target import Target


@dataclass(frozen=True)
class RehearseHere:
    """Options of `shardkit launch` for a rehearsal before the job, on the cards of this machine or on others."""

    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="First rehearse the job on emulated cards; start it if it fits.")
    ] = False
    gpu: Annotated[
        Text, typer.Option("--gpu", metavar="NAME", help="The cards of --rehearse; default: this machine's.")
    ] = None
    gpu_memory: Annotated[Text, typer.Option(metavar="80GB", help="Per card, if not the card's.")] = None

    def check(self, ctx: typer.Context) -> None:
        """Refuse cards without a rehearsal."""
        if not self.rehearse:
            refuse_options(ctx, ("gpu", "gpu_memory"), "names the cards of --rehearse, which is missing", "add it")


def card_here(config: RunConfig, spec: JobSpec, options: RehearseHere) -> Gpu:
    """The card that a job of `shardkit launch` is rehearsed on.

    Raises:
        LaunchError: the job would run on CPUs.
        ConfigError: this machine's card is not in the table, and no option names another one.
    """
    from ..hardware.cards import GPUS
    from ..launch.ranks.gpus import model_names
    from ..plan.target import choose_target

    if not spec.on_gpus:
        cause = "run.device=cpu" if config.run.device == "cpu" else "this machine has no GPU"
        fix = "leave it out; or rehearse for other machines: shardkit submit --rehearse, shardkit rehearse -- COMMAND"
        raise LaunchError(f"--rehearse asks whether the job fits its GPUs, but {cause}", fix)
    names = model_names()
    name = options.gpu or next((card.name for card in GPUS.values() if card.device_name in names), None)
    if name is None and options.gpu_memory is None:
        cause = f"--rehearse knows no card {names[0]}" if names else "the driver does not name this machine's card"
        raise ConfigError(cause, "pass --gpu with the most similar card, or --gpu-memory SIZE")
    n_ranks = spec.nproc_per_node * spec.nodes[0]
    return _emulated(choose_target(config, n_ranks, spec.nproc_per_node, name, options.gpu_memory))


def card_of_cluster(spec: JobSpec, gpu: str | None, gpu_memory: str | None) -> Gpu:
    """The card that a job of `shardkit submit` is rehearsed on.

    Raises:
        LaunchError: nobody named it, or the job asks for no GPU.
    """
    from ..config.schema import RunConfig
    from ..plan.target import choose_target

    if not spec.gpus_per_node:
        raise LaunchError("--rehearse emulates GPUs, and the job asks for none", "pass --gpus-per-node N, or remove it")
    if gpu is None and gpu_memory is None:
        raise LaunchError("--rehearse needs to know the cluster's cards", "add --gpu NAME or --gpu-memory SIZE")
    n_ranks = spec.nproc_per_node * spec.nodes[0]
    return _emulated(choose_target(RunConfig(), n_ranks, spec.nproc_per_node, gpu, gpu_memory))


def _emulated(target: Target) -> Gpu:
    assert target.gpu is not None, "no card although one was named"
    return target.gpu


def rehearse_first(program: Program, spec: JobSpec, card: Gpu, index: str | None = None) -> None:
    """Rehearse a job in the world of its ranks, and end this command with the verdict's exit code unless it fits.

    Rank 0 runs, with those that it turns out to need; the others are pretended. Everything is told on stderr, as
    stdout may be a script or a manifest. Of an elastic job the fewest nodes are rehearsed, which need most.

    Args:
        index: of an array's task; a script's words may hold it as %a.

    Raises:
        LaunchError: the job cannot be rehearsed.
        BuildError: the emulated GPUs cannot be built.
    """
    from ..rehearse.ranks import command_of_rank, parse_ranks
    from ..rehearse.rehearsal import Limits, rehearse

    n_ranks = spec.nproc_per_node * spec.nodes[0]
    ranks = parse_ranks(n_ranks, spec.nproc_per_node, None)
    typer.echo(f"rehearsing the job on {n_ranks} emulated {card.name}", err=True)
    command = command_of_rank([sys.executable, *_words(program, spec, index)])
    try:
        verdict = rehearse(command, card, spec.gpus_per_node or spec.nproc_per_node, Limits(), ranks)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo(verdict.text(), err=True)
    if verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


def _words(program: Program, spec: JobSpec, index: str | None) -> list[str]:
    """The words after `python` that start a rank here: a submitted config is not in its run directory yet."""
    if program.script is not None:
        return list((program.script if index is None else program.script.numbered(index)).argv)
    config = None if program.config == "-" else program.config
    overrides = tuple(program.overrides_of_all_tasks)
    # `-m` would import a torch.py of the current directory.
    return replace(spec, script=None, config=config, overrides=overrides, starts_by_file=True).program
