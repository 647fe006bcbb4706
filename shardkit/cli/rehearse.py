"""`shardkit rehearse`: run any program, unchanged, on GPUs that are not there; before `launch` and `submit` too."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ..errors import ConfigError, LaunchError, gib
from .program import SCRIPT_WORDS, Count, MaybePath, Program, Text, Words, refuse_options

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..hardware.cards import Gpu
    from ..launch.spec import JobSpec


@dataclass(frozen=True)
class RehearsedCards:
    gpu: Annotated[Text, typer.Option("--gpu", metavar="NAME", help="a100-40gb, l4, …; default: h100.")] = None
    gpus: Annotated[Count, typer.Option(metavar="N", min=1, max=64, help="Emulated GPUs of a machine.")] = None
    gpu_memory: Annotated[Text, typer.Option(metavar="80GB", help="Per GPU, if not the card's.")] = None

    def card(self) -> Gpu:
        from ..hardware.cards import DEFAULT, find_gpu, parse_bytes

        card = find_gpu(self.gpu or DEFAULT)
        if self.gpu_memory is None:
            return card
        return replace(card, memory=parse_bytes(self.gpu_memory, "--gpu-memory"))


@dataclass(frozen=True)
class RehearsalOptions:
    ranks: Annotated[
        Count, typer.Option(metavar="N", min=1, help="Run a few of N ranks, 8 a machine, and pretend the others.")
    ] = None
    live: Annotated[
        Text, typer.Option(metavar="0,64", help="The ranks that run; rank 0, and those it turns out to need.")
    ] = None
    until: Annotated[
        Text,
        typer.Option(metavar="save|evaluation", help="End once a step follows the first of them, not after K steps."),
    ] = None
    steps: Annotated[int, typer.Option(metavar="K", min=1, help="End after K optimizer steps of every rank.")] = 3
    time_limit: Annotated[float, typer.Option(metavar="S", min=1, help="End after S seconds.")] = 600.0
    assume: Annotated[
        Words,
        typer.Option("--assume", metavar="FILE:LINE=N", help="What a line reads that nobody computed; repeat it."),
    ] = None
    allow_writes: Annotated[bool, typer.Option("--allow-writes", help="Let the program's writes be real.")] = False
    network: Annotated[bool, typer.Option("--network", help="Let the program use the network.")] = False
    expect: Annotated[Text, typer.Option(metavar="LIMIT", help="'peak < 70 GiB': else exit code 4.")] = None
    keep: Annotated[
        MaybePath, typer.Option(metavar="DIR", help="Keep what the program wrote, and its records, in this new folder.")
    ] = None


@dataclass(frozen=True)
class ComputeOptions:
    compute: Annotated[
        bool, typer.Option("--compute", help="Compute, on the CPU, and run to the end: for tests that need GPUs.")
    ] = False
    late_copies: Annotated[
        bool, typer.Option("--late-copies", help="With --compute: copies begin late, so that a missing wait shows.")
    ] = False
    poison: Annotated[
        bool, typer.Option("--poison", help="With --compute: new memory is NaN, so that reading it shows.")
    ] = False


def pretend_weights(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A config.json of transformers, or its folder.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The model folder to write.")],
    dtype: Annotated[Text, typer.Option(metavar="TYPE", help="fp32, bf16 or fp16, if not the config's.")] = None,
) -> None:
    """Write a model folder whose weights are all zero and take no space, for programs to load in a rehearsal."""
    from ..checkpoint.formats.pretended import write_pretended_weights
    from ..checkpoint.formats.targets import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is no type of weights", f"choose one of {', '.join(DTYPES)}")
    written = write_pretended_weights(config, folder, dtype)
    typer.echo(f"{folder}: {written.class_name}, {written.n_parameters:,} numbers, {gib(written.n_bytes)} by name")
    for note in written.notes:
        typer.echo(note)


def rehearse(
    ctx: typer.Context,
    *,
    cards: RehearsedCards,
    options: RehearsalOptions,
    compute_options: ComputeOptions,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the command behind `--`, unchanged, on emulated GPUs, and say whether it starts and whether it fits.

    Every rank is a process here, on the real CUDA build of torch, over kernels that compute nothing. What the program
    writes is thrown away, and it reaches no network. With --compute they compute on the CPU, and the program runs to
    its end.

    Exit code 0 if it fits, 4 if it does not, 7 if that is not known, 8 if the program failed by itself.
    """
    import json

    from ..plan.target import known_here
    from ..rehearse.ranks import command_of_rank, parse_ranks
    from ..rehearse.rehearsal import Limits, parse_assumed
    from ..rehearse.rehearsal import rehearse as run
    from ..rehearse.verdict import parse_expectation

    command = ctx.meta[SCRIPT_WORDS]
    if not command:
        fix = "shardkit rehearse --gpu h100 --gpus 8 -- torchrun --nproc-per-node 8 train.py"
        raise LaunchError("no command stands behind `--`", fix)
    card = cards.card()
    if compute_options.compute:
        _compute(command, card, cards.gpus or 1, options, compute_options, json_output)
    if compute_options.late_copies or compute_options.poison:
        raise LaunchError("--late-copies and --poison show in what is computed", "give --compute as well")
    card = known_here(card, options.ranks or cards.gpus or 1)
    if options.until not in (None, "save", "evaluation"):
        raise LaunchError(f"--until {options.until}: no such event", "--until save, --until evaluation, or --steps K")
    expectation = None if options.expect is None else parse_expectation(options.expect)
    limits = Limits(
        options.steps, options.until or "", options.time_limit, options.allow_writes, options.network, options.keep,
        parse_assumed(options.assume or ()),
    )  # fmt: skip
    ranks = None
    if options.ranks is not None:
        ranks = parse_ranks(options.ranks, cards.gpus, options.live)
        command = command_of_rank(command)
    elif options.live is not None:
        raise LaunchError("--live names ranks of --ranks, which is not given", "--ranks 128 --live 0,64")
    gpus = ranks.per_node if ranks is not None else cards.gpus or 1
    try:
        verdict = run(command, card, gpus, limits, ranks)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    verdict = verdict if expectation is None else expectation.applied(verdict)
    typer.echo(json.dumps(verdict.as_json(), indent=1) if json_output else verdict.text())
    raise typer.Exit(verdict.exit_code)


def _compute(
    command: list[str], card: Gpu, gpus: int, options: RehearsalOptions, how: ComputeOptions, json_output: bool
) -> NoReturn:
    import json

    from ..rehearse.rehearsal import Limits, run_computed

    names = [f"--{key}" for key in ("ranks", "live", "until", "expect", "assume") if getattr(options, key)]
    names += ["--steps"] if options.steps != RehearsalOptions.steps else []
    if names:
        cause = f"{' and '.join(names)}: with --compute every rank runs, to the program's end, and memory is not judged"
        raise LaunchError(cause, "leave out --compute, or the other options")
    limits = Limits(
        time_limit_s=options.time_limit, allow_writes=options.allow_writes, network=options.network, keep=options.keep
    )
    try:
        run = run_computed(command, card, gpus, limits, how.late_copies, how.poison)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo(json.dumps(run.as_json(), indent=1) if json_output else run.text())
    raise typer.Exit(run.exit_code)


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
        if not self.rehearse:
            refuse_options(ctx, ("gpu", "gpu_memory"), "names the cards of --rehearse, which is missing", "add it")


def card_here(config: RunConfig, spec: JobSpec, options: RehearseHere) -> Gpu:
    """The card that a job of `shardkit launch` is rehearsed on."""
    from ..hardware.cards import GPUS
    from ..launch.ranks.env import model_names
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
    card = choose_target(config, n_ranks, spec.nproc_per_node, name, options.gpu_memory).gpu
    assert card is not None, "no card although one was named"
    return card


def card_of_cluster(spec: JobSpec, gpu: str | None, gpu_memory: str | None) -> Gpu:
    """The card that a job of `shardkit submit` is rehearsed on."""
    from ..config.schema import RunConfig
    from ..plan.target import choose_target

    if not spec.gpus_per_node:
        raise LaunchError("--rehearse emulates GPUs, and the job asks for none", "pass --gpus-per-node N, or remove it")
    if gpu is None and gpu_memory is None:
        raise LaunchError("--rehearse needs to know the cluster's cards", "add --gpu NAME or --gpu-memory SIZE")
    n_ranks = spec.nproc_per_node * spec.nodes[0]
    card = choose_target(RunConfig(), n_ranks, spec.nproc_per_node, gpu, gpu_memory).gpu
    assert card is not None, "no card although one was named"
    return card


def rehearse_first(program: Program, spec: JobSpec, card: Gpu, index: str | None = None) -> None:
    """Rehearse a job in the world of its ranks, and end this command with the verdict's exit code unless it fits.

    Rank 0 runs, with those that it turns out to need; the others are pretended. Everything is told on stderr, as stdout
    may be a script or a manifest. Of an elastic job the fewest nodes are rehearsed, which need most. `index`: of an
    array's task; a script's words may hold it as %a.
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
