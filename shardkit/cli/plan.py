"""`shardkit plan`: predict each rank's memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .program import Overrides, Text, Words

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..foreign.translate import ForeignJob
    from ..plan.advise import Changes
    from ..plan.client import Planner
    from ..plan.model.estimate import MemoryEstimate
    from ..plan.target import Target
    from .plan_job import PlanJob

GpuName = Annotated[Text, typer.Option("--gpu", metavar="NAME", help="h100, a100-40gb, l4, …")]
GpuMemory = Annotated[Text, typer.Option(metavar="80GB", help="Per GPU, if not the card's.")]
HostMemory = Annotated[Text, typer.Option(metavar="1TB", help="Per machine.")]
MemoryCap = Annotated[
    Text,
    typer.Option(metavar="24GiB", help="Emulate a smaller card, also on the CPU."),
]
From = Annotated[
    Words,
    typer.Option("--from", metavar="FILE", help="Another tool's file in place of CONFIG; may be repeated."),
]
Model = Annotated[
    Text,
    typer.Option(metavar="DIR|config.json", help="--from: the transformers model."),
]
Peft = Annotated[
    Text,
    typer.Option(metavar="DIR|adapter_config.json", help="--from: the adapter that peft puts into it."),
]
ConfigOrFrom = Annotated[
    Text,
    typer.Argument(metavar="CONFIG", help="A YAML file; - for the defaults."),
]
JobGpus = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(metavar="N", help="GPUs of the whole job, one rank each. [default: 1, or what --from says]"),
]
BUDGET_S = 120.0


@dataclass(frozen=True)
class FileOptions:
    """Other tools' files that describe a job."""

    files: From = None
    model: Model = None
    peft: Peft = None

    def refuse_without_files(self) -> None:
        """Refuse a model or an adapter beside a config, which has keys for both.

        Raises:
            ConfigError: one of the two was given without --from.
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


@dataclass(frozen=True)
class CardOptions:
    """How many GPUs a job has, and how much memory."""

    gpus: JobGpus = None
    gpus_per_node: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="GPUs on each machine. [default: 8, or what --from says]"),
    ] = None
    gpu: GpuName = None
    gpu_memory: GpuMemory = None
    host_memory: HostMemory = None
    memory_cap: MemoryCap = None

    def target(self, config: RunConfig, gpus: int = 1, gpus_per_node: int | None = None, **job: Any) -> Target:
        """The cards to plan for; what no option says comes from the job."""
        from ..plan.target import choose_target

        ranks = self.gpus if self.gpus is not None else gpus
        per_node = self.gpus_per_node if self.gpus_per_node is not None else gpus_per_node or 8
        return choose_target(
            config, ranks, per_node, self.gpu, self.gpu_memory, self.host_memory, memory_cap=self.memory_cap, **job
        )


@dataclass(frozen=True)
class SearchOptions:
    """Options of `shardkit plan --auto`."""

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

    def refuse_without_auto(self) -> None:
        """Refuse options of a search that was not asked for.

        Raises:
            ConfigError: one of them was given without --auto.
        """
        from ..errors import ConfigError

        if not self.auto and self != SearchOptions():
            raise ConfigError("--verify, --margin, --budget and --out belong to --auto, which is missing", "add --auto")

    def run(
        self, path: str | None, overrides: list[str], target: Target, memory_cap: str | None, as_json: bool
    ) -> None:
        """Search from a config, print the result, and write it."""
        from .auto import plan_automatically

        plan_automatically(
            path, overrides, target, self.margin, self.verify, memory_cap, self.out, as_json, self.budget
        )


def plan(
    config: ConfigOrFrom = None,
    overrides: Overrides = None,
    *,
    job_files: FileOptions,
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
    search.refuse_without_auto()
    if job_files.files:
        job, settings = read_files(config, overrides or [], job_files, cards.gpus)
        subject = subject_of_files(job, settings, cards, search, json_output)
    else:
        subject = subject_of_config(read_path(config, job_files), overrides or [], cards, search, json_output)
    if subject is not None:
        from .plan_job import print_plan

        raise typer.Exit(print_plan(subject, json_output, advice))


def subject_of_config(
    path: str | None, overrides: list[str], cards: CardOptions, search: SearchOptions, as_json: bool
) -> PlanJob | None:
    """The job of a config; `None` after a search from the config.

    Args:
        path: a YAML file; None for the defaults.
    """
    from ..plan.advise import changes_that_fit
    from .plan_job import PlanJob, note_refused_start
    from .program import load

    def loaded(changes: Sequence[str] = ()) -> RunConfig:
        return load(path or "-", [*overrides, *changes]).config

    config = loaded()
    note_refused_start(config.run)
    target = cards.target(config)
    if search.auto:
        search.run(path, overrides, target, cards.memory_cap, as_json)
        return None

    def advisor(estimate: MemoryEstimate, planner: Planner) -> Changes:
        return changes_that_fit(config, estimate, planner, lambda changes: (loaded(changes), None))

    return PlanJob("the defaults" if path is None else Path(path).name, config, target, advisor)


def subject_of_files(
    job: ForeignJob, settings: list[str], cards: CardOptions, search: SearchOptions, as_json: bool
) -> PlanJob | None:
    """The job of other tools' files, whose keys are printed first; `None` after a search from the job."""
    from ..foreign.advice import changes_in_files
    from ..foreign.show import OVERRIDES, details, mapping, save
    from .plan_job import Details, PlanJob

    overrides = [*OVERRIDES, *settings]
    if not as_json:
        typer.echo("\n".join(mapping(job)) + "\n")
    config = job.load(overrides).config
    target = cards.target(config, job.gpus, job.gpus_per_node, expandable=job.expandable)
    if search.auto:
        job.refuse_unplanned()
        search.run(str(save(job, search.out)), settings, target, cards.memory_cap, as_json)
        return None
    return PlanJob(
        job.name,
        config,
        target,
        lambda estimate, planner: changes_in_files(job, overrides, estimate, planner),
        lambda estimate: Details(*details(job, config, estimate, target.ranks_per_node)),
        job.loop,
        job.not_planned,
    )


def read_path(config: str | None, job_files: FileOptions) -> str | None:
    """The path of a config; `None` for the defaults.

    Raises:
        ConfigError: no config is named, or options of other tools' files are given.
    """
    from ..errors import ConfigError

    job_files.refuse_without_files()
    if config is None:
        raise ConfigError(
            "no config is named", "name a YAML file, - for the defaults, or --from with another tool's file"
        )
    return None if config == "-" else config


def read_files(
    config: str | None, overrides: list[str], job_files: FileOptions, gpus: int | None
) -> tuple[ForeignJob, list[str]]:
    """The job of other tools' files, and the settings on the command line.

    `--from a.yaml b.json`: to typer, the second file stands in the place of a config.
    """
    from ..foreign.translate import read_job

    words = [*([] if config is None else [config]), *overrides]
    settings = [word for word in words if "=" in word]
    files = [*(job_files.files or []), *(word for word in words if "=" not in word)]
    return read_job(files, job_files.model, gpus, job_files.peft, settings), settings
