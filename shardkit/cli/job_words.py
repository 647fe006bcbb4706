"""The job that `plan` and `ladder` work on, as the words of the command name it: a config's, or other tools' files'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from .program import Overrides, Text, Words, load

if TYPE_CHECKING:
    from ..config.load import LoadedConfig
    from ..config.schema import RunConfig
    from ..foreign.translate import ForeignJob
    from ..plan.advise import Changes
    from ..plan.client import Planner
    from ..plan.model.estimate import MemoryEstimate
    from ..plan.search.ladder import Try
    from .plan import CardOptions, SearchOptions
    from .plan_job import PlanJob

Model = Annotated[Text, typer.Option(metavar="DIR|config.json", help="--from: the transformers model.")]
Peft = Annotated[
    Text, typer.Option(metavar="DIR|adapter_config.json", help="--from: the adapter that peft puts into it.")
]


@dataclass(frozen=True)
class JobWords:
    """The words that name a job: a config and overrides, or other tools' files and settings that no file has."""

    config: Annotated[Text, typer.Argument(metavar="CONFIG", help="A YAML file; - for the defaults.")] = None
    overrides: Overrides = None
    files: Annotated[
        Words, typer.Option("--from", metavar="FILE", help="Another tool's file in place of CONFIG; may be repeated.")
    ] = None
    model: Model = None
    peft: Peft = None

    def job(self, gpus: int | None) -> ConfigJob | FilesJob:
        """The job of a config, or of other tools' files, which are read here.

        Raises:
            ConfigError: the words name no job, or have options of other tools' files beside a config; or the files
                cannot be read.
        """
        return self.files_job(gpus) if self.files else self._config_job()

    def files_job(self, gpus: int | None) -> FilesJob:
        """The job of other tools' files; of `--from a.yaml b.json`, the second stands in the place of a config."""
        from ..foreign.translate import read_job

        words = [*([] if self.config is None else [self.config]), *(self.overrides or [])]
        settings = [word for word in words if "=" in word]
        files = [*(self.files or []), *(word for word in words if "=" not in word)]
        return FilesJob(read_job(files, self.model, gpus, self.peft, settings), tuple(settings))

    def _config_job(self) -> ConfigJob:
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
        if self.config is None:
            raise ConfigError(
                "no config is named", "name a YAML file, - for the defaults, or --from with another tool's file"
            )
        return ConfigJob(self.config, tuple(self.overrides or ()))


@dataclass(frozen=True)
class ConfigJob:
    """A job that a config describes.

    Attributes:
        file: a YAML file; - for the defaults.
    """

    file: str
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
        """The config with more overrides."""
        return self.load(changes).config

    def changes(self, estimate: MemoryEstimate, planner: Planner) -> Changes:
        """Changes of the config that need less memory, each planned."""
        from ..plan.advise import changes_that_fit

        return changes_that_fit(self.config(), estimate, planner, lambda changes: (self.config(changes), None))

    def tried(self, ranks: int, folder: Path, steps: int, memory_cap: str | None) -> Try:
        """Runs the job with more overrides, each attempt in fresh processes and in `folder/NUMBER`.

        Raises:
            ConfigError: the folder cannot be written.
        """
        from ..plan.search.trial import run_trial, writing
        from ..plan.target import cap_setting

        with writing(folder):
            pass
        file, cap = None if self.file == "-" else self.file, cap_setting(memory_cap)
        return lambda settings, position: run_trial(
            file, [*self.overrides, *settings], ranks, folder / str(position + 1), steps, cap
        )

    def to_plan(self, cards: CardOptions, as_json: bool) -> PlanJob:
        """The job on its cards; a note on stderr says why it would not start in this directory."""
        from .plan_job import PlanJob, note_refused_start

        config = self.config()
        note_refused_start(config.run)
        return PlanJob(self.name, config, cards.target(config), self.changes)

    def search(self, cards: CardOptions, options: SearchOptions, as_json: bool) -> None:
        """Search from the config, print the result, and write it."""
        from .auto import plan_automatically

        plan_automatically(self, self.to_plan(cards, as_json).target, options, cards.memory_cap, as_json)


@dataclass(frozen=True)
class FilesJob:
    """A job that other tools' files describe.

    Attributes:
        settings: `section.key=value` that no file has.
    """

    job: ForeignJob
    settings: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """The settings, and those of every job of other tools."""
        from ..foreign.show import OVERRIDES

        return [*OVERRIDES, *self.settings]

    def config(self) -> RunConfig:
        """The config here that trains as the files say."""
        return self.job.load(self.overrides).config

    def changes(self, estimate: MemoryEstimate, planner: Planner) -> Changes:
        """Changes of the files that need less memory, each planned."""
        from ..foreign.advice import changes_in_files

        return changes_in_files(self.job, self.overrides, estimate, planner)

    def to_plan(self, cards: CardOptions, as_json: bool) -> PlanJob:
        """The job on its cards; unless the plan is for programs, what each key of the files becomes is printed."""
        from ..foreign.show import details, mapping
        from .plan_job import Details, PlanJob

        job = self.job
        if not as_json:
            typer.echo("\n".join(mapping(job)) + "\n")
        config = self.config()
        target = cards.target(config, job.gpus, job.gpus_per_node, expandable=job.expandable)
        return PlanJob(
            job.name,
            config,
            target,
            self.changes,
            lambda estimate: Details(*details(job, config, estimate, target.ranks_per_node)),
            job.loop,
            job.not_planned,
        )

    def search(self, cards: CardOptions, options: SearchOptions, as_json: bool) -> None:
        """Search from a config with the job's settings, `from.yaml`, print the result, and write it.

        Raises:
            NotPlannedError: a key of the files changes memory, and no plan models it.
        """
        from ..foreign.show import save
        from .auto import plan_automatically

        target = self.to_plan(cards, as_json).target
        self.job.refuse_unplanned()
        config = ConfigJob(str(save(self.job, options.out)), self.settings)
        plan_automatically(config, target, options, cards.memory_cap, as_json)
