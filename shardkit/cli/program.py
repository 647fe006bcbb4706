"""The program of a job: a config with its overrides, or a script behind `--`."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_type_hints

import typer
from typer.core import TyperCommand

from ..errors import LaunchError

if TYPE_CHECKING:
    from ..config.load import LoadedConfig
    from ..launch.script import Script

SCRIPT_WORDS = "script"
"""The key of the words behind `--` in a command's context; None without `--`."""
OPTION_WORDS = "options"
"""The key of the words before them."""
_FOR_SCRIPTS = ("run_dir", "on_preempt", "heartbeat", "heartbeat_timeout", "checkpoints")
_FOR_PLANS = ("gpu", "gpu_memory", "force")
UsageError: Any = typer.BadParameter.__base__

Text = Optional[str]  # noqa: UP045 - typer reads it at run time on Python 3.10
Words = Optional[list[str]]  # noqa: UP045
Count = Optional[int]  # noqa: UP045
Number = Optional[float]  # noqa: UP045
MaybePath = Optional[Path]  # noqa: UP045
Config = Annotated[
    Text,
    typer.Argument(metavar="CONFIG | -- SCRIPT", help="The YAML file of the run, - for defaults; or your own script."),
]
Overrides = Annotated[Words, typer.Argument(metavar="[section.key=value]...", help="Overrides the file's value.")]
RunDir = Annotated[
    Text, typer.Option("--run-dir", metavar="DIR", help="A script's logs go there; default: runs/SCRIPT.")
]


class JobCommand(TyperCommand):
    """A command that accepts a script and its arguments behind `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set the words behind `--` aside, and read the others."""
        words = args[: args.index("--")] if "--" in args else list(args)
        ctx.meta[OPTION_WORDS] = words
        ctx.meta[SCRIPT_WORDS] = args[len(words) + 1 :] if len(words) < len(args) else None
        try:
            return list(super().parse_args(ctx, list(words)))
        except UsageError as error:
            index = index_of_script(words)
            if ctx.meta[SCRIPT_WORDS] is not None or index is None:
                raise
            raise LaunchError(*missing_dashes(ctx, index)) from error


def index_of_script(words: Sequence[str]) -> int | None:
    """The index of a script or of `-m` among words that should be a config and its overrides; None without one."""
    return next((i for i, word in enumerate(words) if word == "-m" or re.fullmatch(r"[^=]+\.py", word)), None)


def missing_dashes(ctx: Any, index: int) -> tuple[str, str]:
    """Cause and fix for a script without `--` before it, at `index`; options of the command behind it stay its own."""
    words = ctx.meta[OPTION_WORDS]
    is_flag = {name: getattr(param, "is_flag", False) for param in ctx.command.params for name in param.opts}
    options, script_words, remaining = list[str](), list[str](), iter(words[index + 1 :])
    for word in remaining:
        name, equals, _ = word.partition("=")
        if not word.startswith("-") or name not in is_flag:
            script_words.append(word)
            continue
        options += [word] if is_flag[name] or equals else [word, *islice(remaining, 1)]
    corrected = ["shardkit", ctx.info_name, *words[:index], *options, "--", words[index], *script_words]
    return f"{words[index]} is not a config: a script stands behind `--`", shlex.join(corrected)


@dataclass(frozen=True)
class RankOptions:
    """Options for the ranks of a script: how they learn of a preemption, and how long they may be silent."""

    on_preempt: Annotated[
        str, typer.Option(metavar="term|usr1|usr2|file", help="How a script learns that its job is preempted.")
    ] = "term"
    heartbeat: Annotated[
        Text, typer.Option(metavar="auto|FILE", help="A script's ranks that stop touching it are ended as hung.")
    ] = None
    heartbeat_timeout: Annotated[float, typer.Option(metavar="S", help="Seconds without a heartbeat.")] = 600.0
    grace_s: Annotated[
        Number, typer.Option("--grace-s", metavar="S", help="The ranks' time to save and end after SIGTERM.")
    ] = None


@dataclass(frozen=True)
class Program:
    config: str | None  # the YAML file, `-` for defaults; None for a script
    overrides: tuple[str, ...]  # `section.key=value` for the config
    script: Script | None = None  # the script; None for a config
    log_dir: str | None = None  # the folder of a script's logs, if the user names one

    @property
    def run_dir(self) -> str:
        """The run directory of a script."""
        return self.log_dir or os.path.join("runs", self.script.name if self.script is not None else "script")

    @property
    def overrides_of_all_tasks(self) -> list[str]:
        """The overrides without those that hold the index of an array's task."""
        return [override for override in self.overrides if "%a" not in override]

    def load(self, changes: Sequence[str] = ()) -> LoadedConfig:
        """The config, with overrides that hold for every task of an array, then `changes`."""
        return load(str(self.config), [*self.overrides_of_all_tasks, *changes])

    def launch_command(self) -> str:
        if self.script is None:
            return shlex.join(["shardkit", "launch", str(self.config), *self.overrides_of_all_tasks])
        logs = [] if self.log_dir is None else ["--run-dir", self.log_dir]
        return shlex.join(["shardkit", "launch", *logs, "--", *self.script.argv])


def load(config: str, overrides: Sequence[str]) -> LoadedConfig:
    from ..config.load import load_config

    return load_config(None if config == "-" else config, list(overrides))


def read_program(
    ctx: typer.Context, config: str | None, overrides: Sequence[str], ranks: RankOptions, log_dir: str | None,
    checkpoints: str | None = None,
) -> Program:  # fmt: skip
    """The program of a command line, checked."""
    from ..launch import script as scripts

    words, command = ctx.meta[SCRIPT_WORDS], str(ctx.info_name)
    if words is None:
        if config is None:
            usage = f"shardkit {command} CONFIG, or shardkit {command} [options] -- train.py arguments"
            raise LaunchError("neither a config nor a script was given", usage)
        if index_of_script([config]) is not None:
            raise LaunchError(*missing_dashes(ctx, ctx.meta[OPTION_WORDS].index(config)))
        refuse_options(ctx, _FOR_SCRIPTS, "applies to a script behind `--`, and this is a config", "remove it")
        scripts.check_grace(0 if ranks.grace_s is None else ranks.grace_s)
        return Program(config, tuple(overrides))
    if config is not None:
        cause = f"both a config ({config}) and a script ({' '.join(words[:2])}) were given"
        raise LaunchError(cause, "remove one of them; the script's own arguments follow its name")
    refuse_options(ctx, ("bind_cpus",), "applies to a config, and this is a script", "remove it")
    if not ctx.params.get("rehearse"):
        refuse_options(ctx, _FOR_PLANS, "plans a config, and this is a script", "add --rehearse, or remove it")
    if ranks.heartbeat is None:
        cause = "says how long --heartbeat may be silent, which is not given"
        refuse_options(ctx, ("heartbeat_timeout",), cause, "pass --heartbeat auto or FILE too")
    script = scripts.Script(
        argv=tuple(words), on_preempt=ranks.on_preempt, heartbeat=ranks.heartbeat,
        heartbeat_timeout_s=ranks.heartbeat_timeout, checkpoints=checkpoints,
        **({} if ranks.grace_s is None else {"grace_s": ranks.grace_s}),
    )  # fmt: skip
    scripts.check(script, None if ctx.params.get("to", "slurm") != "slurm" else Path.cwd())
    return Program(None, (), script, log_dir)


def refuse_options(ctx: typer.Context, names: Sequence[str], reason: str, fix: str) -> None:
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise LaunchError(f"--{name.replace('_', '-')} {reason}", fix)


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of the dataclasses among its parameters, in the order of the fields.

    typer reads a function's signature, and knows no dataclass. It gets a function with flat parameters, which fills the
    dataclasses and calls the command.
    """
    groups: dict[str, type[Any]] = {}
    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        annotation = parameter.annotation
        if isinstance(annotation, type) and is_dataclass(annotation):
            groups[parameter.name] = annotation
            types = get_type_hints(annotation, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, annotation=types[field.name],
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                )
                for field in fields(annotation)
            ]  # fmt: skip
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def flat(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
        command(**options)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
