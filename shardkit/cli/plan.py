"""`shardkit plan`: predict each rank's memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .program import Overrides, Text, Words

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..foreign.translate import Job
    from ..plan.advise import Change
    from ..plan.client import Planner
    from ..plan.model.estimate import MemoryEstimate
    from ..plan.target import Target
    from .progress import Waiting

BUDGET_S = 120.0
DOES_NOT_FIT, NOT_PLANNED = 4, 7
"""Exit codes of `shardkit plan`."""

GpuName = Annotated[Text, typer.Option("--gpu", metavar="NAME", help="h100, a100-40gb, l4, …")]
GpuMemory = Annotated[Text, typer.Option(metavar="80GB", help="Per GPU, if not the card's.")]
HostMemory = Annotated[Text, typer.Option(metavar="1TB", help="Per machine.")]
MemoryCap = Annotated[Text, typer.Option(metavar="24GiB", help="Emulate a smaller card, also on the CPU.")]
Model = Annotated[Text, typer.Option(metavar="DIR|config.json", help="--from: the transformers model.")]
Peft = Annotated[
    Text, typer.Option(metavar="DIR|adapter_config.json", help="--from: the adapter that peft puts into it.")
]
ConfigOrFrom = Annotated[Text, typer.Argument(metavar="CONFIG", help="A YAML file; - for the defaults.")]
JobGpus = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(metavar="N", help="GPUs of the whole job, one rank each. [default: 1, or what --from says]"),
]


@dataclass(frozen=True)
class ForeignOptions:
    """A job that other tools' files describe, in place of a config."""

    from_files: Annotated[
        Words, typer.Option("--from", metavar="FILE", help="Another tool's file in place of CONFIG; may be repeated.")
    ] = None
    model: Model = None
    peft: Peft = None

    def read(self, config: str | None, overrides: Sequence[str], gpus: int | None) -> tuple[Job, list[str]]:
        """The job of the files, and the settings that no file has.

        Args:
            config: a further file or a setting, as is each of `overrides`: `--from a.yaml b.json key=value`.
        """
        from ..foreign.translate import read_job

        words = [*([] if config is None else [config]), *overrides]
        files = [*(self.from_files or []), *(word for word in words if "=" not in word)]
        settings = [word for word in words if "=" in word]
        return read_job(files, self.model, gpus, self.peft, settings), settings

    def config_path(self, config: str | None) -> str | None:
        """The path of a config, where there is no --from; None for the defaults.

        Raises:
            ConfigError: no config, or an option that belongs to --from.
        """
        from ..errors import ConfigError

        if self.model is not None:
            raise ConfigError(
                f"--model {self.model} belongs to --from; a config has model.hf_config",
                f"add model.hf_config={self.model}",
            )
        if self.peft is not None:
            raise ConfigError(
                f"--peft {self.peft} belongs to --from; a config has a section adapter",
                "set adapter.type=lora, adapter.r, …",
            )
        if config is None:
            raise ConfigError(
                "no config is named", "name a YAML file, - for the defaults, or --from with another tool's file"
            )
        return None if config == "-" else config


@dataclass(frozen=True)
class CardOptions:
    """The GPUs that a plan is for."""

    gpu: GpuName = None
    gpu_memory: GpuMemory = None
    host_memory: HostMemory = None
    memory_cap: MemoryCap = None

    def target(self, config: RunConfig, gpus: int, gpus_per_node: int, expandable: bool = True) -> Target:
        """The ranks, cards and host memory of the plan."""
        from ..plan.target import choose_target

        return choose_target(
            config, gpus, gpus_per_node, self.gpu, self.gpu_memory, self.host_memory, memory_cap=self.memory_cap,
            expandable=expandable,
        )  # fmt: skip


@dataclass(frozen=True)
class SearchOptions:
    """Options of --auto."""

    auto: Annotated[bool, typer.Option("--auto", help="Search for the fastest setting that fits.")] = False
    margin: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            min=0, max=0.9, help="--auto: share of the memory to leave free; default: the estimate's uncertainty."
        ),
    ] = None
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="--auto: search this long, keep the best.")
    ] = BUDGET_S
    verify: Annotated[int, typer.Option(metavar="K", min=0, help="--auto: run the best K here for a few steps.")] = 0
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="--auto: where to write config.yaml, auto.json and the plot.")
    ] = Path("auto")

    def check(self) -> None:
        """Refuse options of --auto without it.

        Raises:
            ConfigError: there is one.
        """
        from ..errors import ConfigError

        is_default = (self.margin, self.budget, self.verify, self.out) == (None, BUDGET_S, 0, Path("auto"))
        if not self.auto and not is_default:
            raise ConfigError("--verify, --margin, --budget and --out belong to --auto, which is missing", "add --auto")


def plan(
    config: ConfigOrFrom = None,
    overrides: Overrides = None,
    *,
    foreign: ForeignOptions,
    gpus: JobGpus = None,
    gpus_per_node: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="GPUs on each machine. [default: 8, or what --from says]"),
    ] = None,
    cards: CardOptions,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    advice: Annotated[bool, typer.Option(help="If it does not fit, plan changes that would.")] = True,
    search: SearchOptions,
) -> None:
    """Predict every rank's memory before CONFIG is launched: by phase and category, and whether it fits.

    With --auto, search engine and offload, activation checkpointing, precision and micro-batch for the setting that is
    predicted to be fastest among those that fit. The samples per step, and every key set on the command line, stay
    unchanged. After --budget seconds, or at Ctrl-C, the best so far is the result.

    With --from, plan the job that files of Accelerate, DeepSpeed or transformers' Trainer describe together, or a
    recipe of axolotl, LLaMA-Factory or TRL, and first say what each of their keys becomes here.

    Exit code 0 if it fits, 4 if it does not, 7 if a key of the files changes memory and is not planned.
    """
    search.check()
    output = PlanOutput(json_output, advice)
    if foreign.from_files:
        from .plan_from import plan_files

        job, settings = foreign.read(config, overrides or [], gpus)
        raise typer.Exit(plan_files(job, settings, gpus, gpus_per_node, cards, search, output))
    path = foreign.config_path(config)
    raise typer.Exit(plan_config(path, overrides or [], gpus, gpus_per_node, cards, search, output))


def plan_config(
    path: str | None, overrides: Sequence[str], gpus: int | None, gpus_per_node: int | None, cards: CardOptions,
    search: SearchOptions, output: PlanOutput,
) -> int:  # fmt: skip
    """Plan a config, None for the defaults, and print the plan; returns the exit code."""
    from ..config.load import load_config
    from ..foreign.files import foreign_file_error
    from ..plan.advise import changes_that_fit
    from ..plan.show import show

    def load(changes: Sequence[str] = ()) -> RunConfig:
        return load_config(path, [*overrides, *changes], foreign_file_error).config

    config = load()
    target = cards.target(config, 1 if gpus is None else gpus, 8 if gpus_per_node is None else gpus_per_node)
    if search.auto:
        search_and_print(path, overrides, target, cards, search, output)
        return 0
    name = "the defaults" if path is None else Path(path).name
    with output.planner(name, target) as (planner, waiting):
        output.first_look(planner, config)
        estimate = planner.predict(config)
        is_misfit = estimate.verdict == "does not fit"
        output.print(show(f"{name}: {config.parallel.strategy}", estimate, target, []))
        changes: list[Change] = []
        if is_misfit and output.advice:
            waiting.now(f"{name}: planning changes that would fit, one after the other")
            changes = changes_that_fit(config, estimate, target, lambda settings: planner.predict(load(settings)))
    output.finish(estimate, changes, has_advice=is_misfit and output.advice)
    return DOES_NOT_FIT if is_misfit else 0


def search_and_print(
    path: str | None, overrides: Sequence[str], target: Target, cards: CardOptions, search: SearchOptions,
    output: PlanOutput,
) -> None:  # fmt: skip
    """Search for the fastest setting of a config that fits, print and write it."""
    from .auto import plan_automatically

    plan_automatically(
        path, overrides, target, search.margin, search.verify, cards.memory_cap, search.out, output.as_json,
        search.budget,
    )  # fmt: skip


@dataclass(frozen=True)
class PlanOutput:
    """Prints a plan: text as it is made, or JSON at the end.

    Attributes:
        as_json: whether only JSON is printed.
        advice: whether changes are planned for a job that does not fit.
    """

    as_json: bool
    advice: bool

    @contextmanager
    def planner(self, name: str, target: Target, loop: Any = None) -> Iterator[tuple[Planner, Waiting]]:
        """A planner, with lines on stderr while it is slow."""
        from ..plan.client import Planner
        from .progress import Waiting

        with (
            Planner(target, loop=loop) as planner,
            Waiting(f"planning {name}: tracing one step of the whole model") as waiting,
        ):
            yield planner, waiting

    def first_look(self, planner: Planner, config: RunConfig, unplanned: Sequence[Any] = ()) -> None:
        """Say what is known before the trace, on stderr."""
        from ..plan.show import first_look
        from .progress import say

        if not self.as_json and (look := planner.first_look(config)):
            say(first_look(look, list(unplanned)))

    def print(self, *lines: str) -> None:
        """Print lines, unless JSON is asked for."""
        if not self.as_json:
            for line in lines:
                typer.echo(line)

    def finish(
        self, estimate: MemoryEstimate, changes: Sequence[Change], has_advice: bool,
        extend: Callable[[dict[str, Any]], None] = lambda document: None,
    ) -> None:  # fmt: skip
        """Print the changes that would fit, or the whole plan as JSON.

        Args:
            extend: adds to the JSON document.
        """
        import json

        from ..plan.show import show_changes

        if not self.as_json:
            self.print(*(["\n" + show_changes(list(changes))] if has_advice else []))
            return
        document: dict[str, Any] = {**estimate.to_json(), "changes": [_change_as_json(change) for change in changes]}
        extend(document)
        typer.echo(json.dumps(document, indent=1))


def _change_as_json(change: Change) -> dict[str, Any]:
    return {
        "settings": change.settings, "saving": change.saving, "cost": change.cost, "needs": change.estimate.needed,
        "verdict": change.estimate.verdict, **({"in_the_files": change.said} if change.said else {}),
    }  # fmt: skip
