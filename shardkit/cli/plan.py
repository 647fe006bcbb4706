"""`shardkit plan`: predict each rank's memory, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .program import Count, Number, Overrides, Text, Words, load
from .progress import Waiting, say

if TYPE_CHECKING:
    from ..config.load import LoadedConfig
    from ..config.schema import RunConfig
    from ..plan.search.ladder import Try
    from ..plan.target import Target

FITS, MISFIT, NOT_PLANNED = 0, 4, 7
"""Exit codes."""
BUDGET_S = 120.0
GpuName = Annotated[Text, typer.Option("--gpu", metavar="NAME", help="h100, a100-40gb, l4, …")]
GpuMemory = Annotated[Text, typer.Option(metavar="80GB", help="Per GPU, if not the card's.")]
HostMemory = Annotated[Text, typer.Option(metavar="1TB", help="Per machine.")]
MemoryCap = Annotated[Text, typer.Option(metavar="24GiB", help="Emulate a smaller card, also on the CPU.")]
Config = Annotated[Text, typer.Argument(metavar="CONFIG", help="A YAML file; - for the defaults.")]


@dataclass(frozen=True)
class CardOptions:
    """How many GPUs a job has, and how much memory."""

    gpus: Annotated[
        Count, typer.Option(metavar="N", help="GPUs of the whole job, one rank each. [default: 1, or what --from says]")
    ] = None
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


@dataclass(frozen=True)
class LengthOptions:
    """Options of `shardkit plan --longest`."""

    longest: Annotated[bool, typer.Option("--longest", help="Find the longest sequence that fits.")] = False
    confirm: Annotated[
        bool, typer.Option("--confirm", help="--longest: train lengths around the boundary here, in --out.")
    ] = False


def refuse_gpu_memory(gpu_memory: str | None) -> None:
    """Refuse a memory of cards that real runs do not have."""
    if gpu_memory is not None:
        cause = f"--gpu-memory {gpu_memory}: real runs have the memory of this machine's cards"
        raise ConfigError(cause, "pass --memory-cap for a smaller one, or predict only")


@dataclass(frozen=True)
class ConfigJob:
    """A job that a config describes."""

    file: str  # a YAML file; - for the defaults
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "the defaults" if self.file == "-" else Path(self.file).name

    @property
    def fixed_keys(self) -> set[str]:
        """`section.key` of every override; one inside a key's mapping fixes that key."""
        return {".".join(override.partition("=")[0].split(".")[:2]) for override in self.overrides}

    def load(self, changes: Sequence[str] = ()) -> LoadedConfig:
        """The config with more overrides, and where each value was set."""
        return load(self.file, [*self.overrides, *changes])

    def config(self, changes: Sequence[str] = ()) -> RunConfig:
        return self.load(changes).config

    def tried(self, ranks: int, folder: Path, steps: int, memory_cap: str | None) -> Try:
        """Runs the job with more overrides, each attempt in fresh processes and in `folder/NUMBER`."""
        from ..plan.search.trial import run_trial, writing
        from ..plan.target import cap_setting

        with writing(folder):
            pass
        file, cap = None if self.file == "-" else self.file, cap_setting(memory_cap)
        return lambda settings, position: run_trial(
            file, [*self.overrides, *settings], ranks, folder / str(position + 1), steps, cap
        )


def plan(
    *,
    config: Config = None,
    overrides: Overrides = None,
    files: Annotated[
        Words, typer.Option("--from", metavar="FILE", help="accelerate.yaml, ds_config.json or both, for CONFIG.")
    ] = None,
    model: Annotated[Text, typer.Option(metavar="DIR|config.json", help="--from: the transformers model.")] = None,
    cards: CardOptions,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    advice: Annotated[bool, typer.Option(help="If it does not fit, plan changes that would.")] = True,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="Trace every layer, also where a few of them tell the verdict.")
    ] = False,
    search: SearchOptions,
    length: LengthOptions,
) -> None:
    """Predict every rank's memory before CONFIG is launched: by phase and category, and whether it fits.

    With --auto, search engine and offload, activation checkpointing, precision and micro-batch for the setting that is
    predicted to be fastest among those that fit. The samples per step, and every key set on the command line, stay
    unchanged. After --budget seconds, or at Ctrl-C, the best so far is the result.

    With --longest, find the longest sequence that fits the config's other settings.

    With --from, plan the job that files of Accelerate and DeepSpeed describe, and first say what each of their keys
    becomes here.

    Exit code 0 if it fits, 4 if it does not, 7 if a key of the files changes memory and is not planned.
    """
    if length.longest and search.auto:
        raise ConfigError("--longest and --auto are two searches", "pass one of them")
    if length.confirm and not length.longest:
        raise ConfigError("--confirm belongs to --longest, which is missing", "add --longest")
    if not search.auto and search != SearchOptions(out=search.out if length.confirm else SearchOptions.out):
        raise ConfigError("--verify, --margin, --budget and --out belong to --auto, which is missing", "add --auto")
    if files:
        if search.auto or length.longest:
            option = "--auto" if search.auto else "--longest"
            fix = "put the settings that plan --from prints into a config, and search from that"
            raise ConfigError(f"{option} searches from a config, and --from names other tools' files", fix)
        words = [*([] if config is None else [config]), *(overrides or [])]  # of --from a b=c, CONFIG is b=c to typer
        raise typer.Exit(_plan_files([*files, *(word for word in words if "=" not in word)],
                                     [word for word in words if "=" in word], model, cards, json_output))  # fmt: skip
    if model is not None:
        fix = f"add model.hf_config={model}"
        raise ConfigError(f"--model {model} belongs to --from; a config has model.hf_config", fix)
    if config is None:
        raise ConfigError("no config is named", "name a YAML file, - for the defaults, or --from with a tool's file")
    job = ConfigJob(config, tuple(overrides or ()))
    run_config = job.config()
    if length.longest:
        _find_longest(job, run_config, cards, search.out if length.confirm else None, json_output)
        return
    target = cards.target(run_config)
    if search.auto:
        from .auto import plan_automatically

        plan_automatically(job, target, search, cards.memory_cap, json_output)
        return

    from ..plan.advise import LIMIT_S, Changes, changes_that_fit
    from ..plan.client import Planner
    from ..plan.show import first_look, show, show_changes

    with Planner(target) as planner, Waiting(f"planning {job.name}: tracing one step") as waiting:
        estimate = None if all_layers else planner.first_look(run_config)
        if estimate is None or not estimate.is_clear:
            if estimate is not None:
                say(first_look(estimate))
            estimate = planner.predict(run_config, all_layers=all_layers)
        misfit, changes = estimate.verdict == "does not fit", Changes()
        if not json_output:
            typer.echo(show(f"{job.name}: {run_config.parallel.strategy}", estimate, target))
        if misfit and advice:
            waiting.now(f"{job.name}: planning changes that would fit, for at most {LIMIT_S:.0f} s")
            changes = changes_that_fit(run_config, estimate, planner)
    if json_output:
        tree = {
            **estimate.to_json(),
            "changes": [
                {"settings": change.settings, "saving": change.saving, "cost": change.cost,
                 "needs": change.estimate.needed, "verdict": change.estimate.verdict,
                 **({"rough": True} if change.rough else {})}
                for change in changes
            ],
        }  # fmt: skip
        typer.echo(json.dumps(tree | ({"not_tried": list(changes.left_out)} if changes.left_out else {}), indent=1))
    elif misfit and advice:
        typer.echo("\n" + show_changes(changes))
    raise typer.Exit(MISFIT if misfit else FITS)


def _find_longest(job: ConfigJob, config: RunConfig, cards: CardOptions, runs: Path | None, json_output: bool) -> None:
    """Print the longest sequence that fits; `runs`: a folder for real runs that confirm it, None = predict only."""
    from ..plan.search.ladder import largest, lengths, show_boundary
    from ..plan.target import target_here

    if runs is None:
        target, try_it = cards.target(config), None
    else:
        refuse_gpu_memory(cards.gpu_memory)
        ranks = cards.gpus or 1
        target = target_here(config, ranks, cards.gpu, cards.memory_cap)
        try_it = job.tried(ranks, runs, 3, cards.memory_cap)
    with Waiting(f"searching the longest sequence of {job.name}"):
        answer = largest(job.config, lengths(config), target, try_it)
    if json_output:
        typer.echo(json.dumps({"schema": 1, **asdict(answer), "device_memory": target.device_memory}, indent=1))
    else:
        typer.echo(show_boundary(answer, "tokens", target.device_memory or 0))


def _plan_files(
    files: Sequence[str], settings: Sequence[str], model: str | None, cards: CardOptions, json_output: bool
) -> int:
    """Plan the job of Accelerate's and DeepSpeed's files, and print what each key became; the exit code."""
    from ..foreign.translate import read_job
    from ..plan.client import Planner
    from ..plan.show import show

    job = read_job(files, model, cards.gpus, settings)
    if not json_output:
        typer.echo("\n".join(job.mapping()) + "\n")
    config = job.load(settings).config
    # Other launchers leave torch's allocator at segments of fixed size.
    target = cards.target(config, job.gpus, job.gpus_per_node, expandable=False)
    with Planner(target) as planner, Waiting(f"planning {job.name}: tracing one step"):
        estimate = planner.predict(config)
    tokens = config.train.micro_batch_size * config.train.seq_len
    beyond = list(job.unplanned_memory(estimate.n_params, tokens, estimate.needed, estimate.device_memory))
    if json_output:
        fields: dict[str, Any] = {
            "from": {
                "keys": [asdict(entry) for entry in job.file_keys], "settings": job.settings,
                "not_planned": job.not_planned, "left_out": beyond,
            }
        }  # fmt: skip
        if job.not_planned:
            fields |= {"verdict": "not planned", "verdict_without": estimate.verdict}
        typer.echo(json.dumps({**estimate.to_json(), **fields}, indent=1))
    else:
        typer.echo(show(f"{job.name}: {config.parallel.strategy}", estimate, target, job.not_planned))
        typer.echo("\n".join(beyond))
    misfit = estimate.verdict == "does not fit"
    return NOT_PLANNED if job.not_planned else MISFIT if misfit else FITS
