"""The `shardkit` command. A command imports its modules when it runs, so `--help` stays instant."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__, errors
from ..config.removed import COMMANDS
from ..errors import LaunchError, ShardkitError, printable
from ..files import cache_dir, module_command, outlive_full_disks
from .program import Count, JobCommand, MaybePath, UsageError, Words, load, with_option_groups

PACKAGE = Path(__file__).parent.parent


MODULES = {
    "launch": "launch", "submit": "submit", "rehearse": "rehearse", "pretend_weights": "rehearse", "prove": "prove",
    "plan": "plan", "ladder": "ladder", "max_model": "ladder",
    "checkpoint": "checkpoint", "convert": "checkpoint",
}  # fmt: skip
"""A command's function → its module here; a command imports no module of another one."""


class _Commands(TyperGroup):
    """The commands; a mistake in the words of any of them takes two lines."""

    commands: Any

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {**self.commands, **dict.fromkeys(name.replace("_", "-") for name in MODULES)}

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command of a name, or None; its module is imported when the command is first asked for."""
        function = name.replace("-", "_")
        if self.commands.get(name) is None and function in MODULES:
            module = import_module(f".{MODULES[function]}", __package__)
            group = typer.Typer(rich_markup_mode=None, add_completion=False)
            if name == "checkpoint":
                group.add_typer(module.app)
            else:
                takes_script = JobCommand if name in ("launch", "submit", "rehearse", "prove") else None
                group.command(name, cls=takes_script)(with_option_groups(getattr(module, function)))
            command: Any = typer.main.get_command(group)  # a group of one command is that command
            self.commands[name] = command.commands[name] if name == "checkpoint" else command
        return self.commands.get(name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args[: args.index("--")] if "--" in args else args
        if any(not word or re.fullmatch(r"--[\w-]+=", word) for word in words):  # as a path: the current directory
            fix = "give it a value, or remove it; a variable of the shell that is not set leaves an empty one"
            raise ShardkitError(f"{shlex.join(['shardkit', *words])}: an empty value names nothing", fix)
        return list(_in_two_lines(ctx, lambda: super(_Commands, self).parse_args(ctx, args)))

    def invoke(self, ctx: Any) -> Any:
        return _in_two_lines(ctx, lambda: super(_Commands, self).invoke(ctx))


def _in_two_lines(root: Any, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # it shows the help
            raise
        ctx = getattr(error, "ctx", None) or root
        path = ctx.command_path
        if ctx is root and root.invoked_subcommand:
            path += f" {root.invoked_subcommand}"
        text = _of_value(error) or error.format_message().partition("\n")[0]
        if removed := re.match(r"No such (?:command|option):? '?([\w-]+)", text):
            command = " ".join([*path.split()[1:], removed[1]])
            if command in COMMANDS:
                raise ShardkitError(f"shardkit {command} was removed", COMMANDS[command]) from error
        cause, _, near = re.sub(r" \(Possible options: | Did you mean ", "\0", text).partition("\0")
        options = re.findall(r"[\w-]+", near)
        fix = f"{path} --help lists its arguments and options"
        if options:
            fix = f"did you mean {' or '.join(options)}?"
        elif "Missing argument" in cause:
            needed = [parameter for parameter in ctx.command.params if parameter.required]
            needed.sort(key=lambda parameter: parameter.param_type_name != "argument")
            words = []
            for parameter in needed:  # as one writes it: `RUN_DIR`, `--out DIR`
                metavar = str(parameter.metavar or parameter.name.upper())
                words.append(metavar if parameter.param_type_name == "argument" else f"{parameter.opts[0]} {metavar}")
            fix = f"write {' '.join([path, *words])}; {path} --help explains it"
        elif (needed_option := getattr(error, "param", None)) is not None and "Missing option" in cause:
            fix = f"add {needed_option.opts[0]} {needed_option.metavar or needed_option.name.upper()}; " + fix
        raise ShardkitError(cause.rstrip(". "), fix) from error


def _of_value(error: Any) -> str:
    """The cause of a value that is no number or out of range, in click's or pydantic's words; else empty."""
    words, parameter = getattr(error, "message", None) or "", getattr(error, "param", None)
    if parameter is None or not re.search(r"valid (integer|float|number)|(greater|less) than|in the range", words):
        return ""
    if hasattr(error.__cause__, "errors"):
        words = words.replace("Input", repr(str(error.__cause__.errors()[0]["input"])))
    words = re.sub(r"a valid integer( range)?(, .*)?", "a whole number", words)
    words = re.sub(r"a valid (float|number)( range)?(, .*)?", "a number", words)
    return f"{parameter.opts[0]} {words}"


# Without markup typer does not import rich, which would double the time that --help takes.
app = typer.Typer(
    name="shardkit",
    cls=_Commands,
    help="Plan, launch, train and account for sharded PyTorch jobs.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"shardkit {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of user errors (or set SHARDKIT_DEBUG=1).")
    ] = False,
) -> None:
    if debug:
        os.environ["SHARDKIT_DEBUG"] = "1"  # child processes report the same way


@app.command()
def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to put configs/ and slurm/; made if missing.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are already there.")] = False,
) -> None:
    """Copy the ready-to-run configs and Slurm templates into DIR."""
    for path in copy_templates(directory, force):
        typer.echo(path)


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration, for editors."""
    import json

    from ..config.errors import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def capability() -> None:
    """Print which strategy supports which feature."""
    from ..config.capability import markdown_table

    typer.echo(markdown_table())


@app.command()
def tokenize(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Text, JSON lines, parquet, arrow, a glob or a datasets folder.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the corpus.")],
    tokenizer: Annotated[
        Path, typer.Option("--tokenizer", metavar="PATH", help="A tokenizer.json, or a model's folder with one.")
    ],
    overrides: Annotated[
        Words, typer.Argument(metavar="[data.KEY=VALUE]...", help="Such as data.loss_on=all data.max_bad_rows=0.01.")
    ] = None,
) -> None:
    """Tokenise a data set into DIR, a memory-mapped corpus with the bounds of its documents: set data.path to it."""
    # A process of its own, as a run's are: this one need not know the data's modules.
    command = module_command("shardkit.data.tokenize")
    command += [source, str(directory), str(tokenizer), *(overrides or [])]
    raise typer.Exit(subprocess.run(command).returncode)


@app.command()
def doctor(
    run_dir: Annotated[str, typer.Option("--run-dir", metavar="DIR", help="Check this directory's disk.")] = "runs",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Keep the measured constants for planning.")] = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Device to measure.")] = "auto",
    cp: Annotated[
        Count,
        typer.Option(
            metavar="N",
            min=1,
            help="Measure all-to-alls of parallel.cp=N. [default without --tp, --ep: a node's ranks]",
        ),
    ] = None,
    tp: Annotated[Count, typer.Option(metavar="N", min=1, help="Measure all-reduces of parallel.tp=N.")] = None,
    ep: Annotated[Count, typer.Option(metavar="N", min=1, help="Measure all-to-alls of parallel.ep=N.")] = None,
) -> None:
    """Look for problems that make training fail or crawl; under torchrun or srun also measure the ranks together."""
    from ..hardware import calibration
    from ..launch import doctor as machine
    from ..launch.ranks.env import detect

    if device not in ("auto", "cpu", "cuda"):
        raise LaunchError(f"--device {device!r} is not a device", "pass auto, cpu or cuda")
    try:
        env = detect()
    except LaunchError:  # `examine` reports it as a finding
        env = None
    measured = None
    if calibrate or (env is not None and env.world_size > 1):
        from ..hardware.measure import measure

        node = env.local_world_size if env and env.world_size % env.local_world_size == 0 else 1
        cp = cp or (node if tp is None and ep is None else 1)
        settings = [f"run.device={device}", f"run.dir={run_dir}", f"train.seq_len={cp}", f"model.max_seq_len={cp}"]
        # The strategy matters for the groups alone: fsdp has all of them.
        settings += ["parallel.strategy=fsdp", f"parallel.cp={cp}", f"parallel.tp={tp or 1}", f"parallel.ep={ep or 1}"]
        config = load("-", settings).config
        measured = measure(config)
        if measured is None:
            return
        if calibrate:
            calibration.save(measured[0])
    checks = machine.examine(Path(run_dir), cache_dir()) + (machine.findings(*measured) if measured else [])
    extra = {"measured": measured[0]} if measured else {}
    typer.echo(machine.as_json(checks, extra) if json_output else machine.render(checks))
    raise typer.Exit(1 if machine.worst(checks) == "fail" else 0)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run.dir of a run, finished or not.")],
    second: Annotated[
        MaybePath, typer.Argument(metavar="[OTHER_RUN_DIR]", help="A second run, to compare with the first.")
    ] = None,
    out: Annotated[
        MaybePath, typer.Option("--out", metavar="FILE", help="Default: report.html, or compare.html, in RUN_DIR.")
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares two: loss, every rank's memory, the plan.

    For a script's run directory, it shows the starts, and the failed rank with its log; for a proof's, its verdict.
    """
    from ..report.measure import status
    from ..report.page import compare_page, read_script, run_page, save, script_page
    from ..report.proof import proof_page, read_verdict
    from ..report.read import read_run

    path = out or run / ("report.html" if second is None else "compare.html")
    if second is None and (proof := read_verdict(run)) is not None:
        save(proof_page(proof, run.resolve().name), path)
        verdict = proof["headline"]
    elif second is None and (script := read_script(run)) is not None:
        save(script_page(script), path)
        verdict = script.status[1]
    else:
        contents = read_run(run)
        save(run_page(contents, path) if second is None else compare_page(contents, read_run(second)), path)
        verdict = status(contents)[1] if second is None else ""
    typer.echo(printable(f"{verdict}; report: {path}" if verdict else f"comparison: {path}"))


def copy_templates(directory: Path, force: bool = False) -> list[Path]:
    """Copy the package's configs and Slurm templates, all checked before any is written; returns the files."""
    targets = {
        directory / folder / source.name: source
        for folder in ("configs", "slurm")
        for source in sorted((PACKAGE / folder).glob("[!.]*"))
    }
    present = [path for path in targets if path.exists()]
    if present and not force:
        further = f" and {len(present) - 1} more" if len(present) > 1 else ""
        cause = f"{present[0]}{further} would be overwritten"
        raise ShardkitError(cause, "pass another directory, or --force to overwrite")
    try:
        for path, source in targets.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read_bytes())
    except OSError as error:
        cause = f"cannot write {error.filename}: {error.strerror}"
        raise ShardkitError(cause, "pass a directory you can write") from error
    return list(targets)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of the console script; ends the process with the exit code of docs/reference.md."""
    if argv is None:
        outlive_full_disks()
    try:
        app(args=None if argv is None else list(argv), prog_name="shardkit")
    except ShardkitError as error:
        sys.exit(errors.report(error))


if __name__ == "__main__":
    main()
