"""`shardkit plan`: predict each rank's memory, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .job_words import JobWords
from .program import Count, Number, Text

if TYPE_CHECKING:
    from ..config.schema import RunConfig
    from ..plan.target import Target

GpuName = Annotated[Text, typer.Option("--gpu", metavar="NAME", help="h100, a100-40gb, l4, …")]
GpuMemory = Annotated[Text, typer.Option(metavar="80GB", help="Per GPU, if not the card's.")]
HostMemory = Annotated[Text, typer.Option(metavar="1TB", help="Per machine.")]
MemoryCap = Annotated[Text, typer.Option(metavar="24GiB", help="Emulate a smaller card, also on the CPU.")]
JobGpus = Annotated[
    Count, typer.Option(metavar="N", help="GPUs of the whole job, one rank each. [default: 1, or what --from says]")
]
BUDGET_S = 120.0


@dataclass(frozen=True)
class CardOptions:
    """How many GPUs a job has, and how much memory."""

    gpus: JobGpus = None
    gpus_per_node: Annotated[
        Count, typer.Option(metavar="N", help="GPUs on each machine. [default: 8, or what --from says]")
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
        Number,
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
        if not self.auto and self != SearchOptions():
            raise ConfigError("--verify, --margin, --budget and --out belong to --auto, which is missing", "add --auto")


def plan(
    *,
    words: JobWords,
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
    job = words.job(cards.gpus)
    if search.auto:
        job.search(cards, search, json_output)
        return
    from .plan_job import print_plan

    raise typer.Exit(print_plan(job.to_plan(cards, json_output), json_output, advice))
