"""`shardkit prove`: whether a parallel training program computes what one process computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ..errors import LaunchError
from .program import SCRIPT_WORDS, Count, MaybePath, Text
from .rehearse import RehearsedCards


@dataclass(frozen=True)
class ProofOptions:
    against: Annotated[
        Text, typer.Option(metavar="'COMMAND'", help="The program of one process; default: the same with one process.")
    ] = None
    steps: Annotated[int, typer.Option(metavar="K", min=1, max=100, help="Optimizer steps to compare.")] = 2
    until: Annotated[Text, typer.Option(metavar="save", help="Compare the first saved files, too.")] = None
    leak: Annotated[bool, typer.Option("--leak", help="Whether tokens of one document move another's.")] = False
    leak_separator: Annotated[
        Count, typer.Option(metavar="ID", min=0, help="--leak, with the token between documents.")
    ] = None
    sample_above: Annotated[
        int, typer.Option(metavar="N", min=64, help="Compare a sample of tensors of more than N numbers.")
    ] = 2**23
    time_limit: Annotated[float, typer.Option(metavar="S", min=1, help="End each run after S seconds.")] = 600.0
    allow_writes: Annotated[bool, typer.Option("--allow-writes", help="Let the program's writes be real.")] = False
    network: Annotated[bool, typer.Option("--network", help="Let the program use the network.")] = False
    expect: Annotated[Text, typer.Option(metavar="same", help="Exit code 4 for all but the same.")] = None
    json_file: Annotated[MaybePath, typer.Option("--json", metavar="FILE", help="Write the verdict there as JSON.")] = (
        None
    )
    keep: Annotated[MaybePath, typer.Option(metavar="DIR", help="Keep records and logs, for a report.")] = None


def prove(ctx: typer.Context, *, cards: RehearsedCards, options: ProofOptions) -> None:
    """Run the command behind `--`, unchanged, and compare its gradients and updates with those of one process.

    Both run on the CPU over gloo, or on emulated GPUs with --gpus. What they write is thrown away, and they reach no
    network.

    Exit code 0: the same; 4: not the same; 9: the same for the rows it saw, but rows repeat or are missing; 7: cannot
    tell; 8: the program failed by itself.
    """
    command = ctx.meta[SCRIPT_WORDS]
    if not command:
        fix = "shardkit prove -- torchrun --nproc-per-node 2 train.py"
        raise LaunchError("no command stands behind `--`", fix)
    _refuse_contradictions(cards, options)
    import json
    import os

    from ..prove.leaks import LeakSearch
    from ..prove.proof import prove as run
    from ..prove.runs import Runner, check
    from ..prove.verdict import SAME, ProofVerdict
    from ..rehearse.build import built
    from ..rehearse.environment import torch_of
    from ..rehearse.rehearsal import Limits, Machine, scratch_folder
    from ..report.proof import VERDICT

    card = cards.card()
    check(command, options.against)
    machine = None
    if cards.gpus is not None:
        machine = Machine(card, cards.gpus, built(torch_of(command, os.environ), computing=True))
    limits = Limits(
        time_limit_s=options.time_limit, allow_writes=options.allow_writes, network=options.network, keep=options.keep
    )

    def write(verdict: ProofVerdict | None, error: LaunchError | None = None) -> None:
        if options.json_file is not None:
            fields = verdict.as_json() if verdict is not None else _refusal(error)
            options.json_file.write_text(json.dumps(fields, indent=1) + "\n")

    try:
        with scratch_folder(options.keep) as folder:
            runner = Runner(folder, limits, machine, options.sample_above)
            leak = LeakSearch(options.leak_separator) if options.leak or options.leak_separator is not None else None
            verdict = run(command, options.against, options.steps, runner, options.until or "", leak)
            if options.keep is not None:
                (folder / VERDICT).write_text(json.dumps(verdict.as_json()))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except LaunchError as error:
        write(None, error)
        raise
    write(verdict)
    typer.echo(verdict.text())
    if options.keep is not None:
        typer.echo(f"see it: shardkit report {options.keep}")
    raise typer.Exit(4 if options.expect and verdict.kind != SAME else verdict.exit_code)


def _refusal(error: LaunchError | None) -> dict[str, object]:
    reasons = [] if error is None else [error.cause, error.fix]
    nothing: dict[str, object] = dict.fromkeys(("word", "parameter", "factor", "weights"))
    return {"verdict": "refused", "exit_code": 2, **nothing, "reasons": reasons}


def _refuse_contradictions(cards: RehearsedCards, options: ProofOptions) -> None:
    if cards.gpus is None and (cards.gpu or cards.gpu_memory):
        raise LaunchError("--gpu and --gpu-memory describe emulated GPUs, and none are asked for", "--gpus 2")
    if options.expect not in (None, "same"):
        raise LaunchError(f"--expect {options.expect}: a proof expects only one thing", "--expect same")
    if options.until not in (None, "save"):
        raise LaunchError(f"--until {options.until}: no such event", "--until save, or --steps K")
    if options.until and options.allow_writes:
        raise LaunchError("--until save reads the files that the sandbox keeps", "leave out --allow-writes")
