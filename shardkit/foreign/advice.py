"""Advice for jobs of other tools: changes in the keys of their files, each planned as their tools would run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import yaml

from ..config.load import merged
from ..config.schema import RunConfig
from ..errors import ShardkitError, gib
from ..oom.advice import Advice
from ..plan.advise import Change, Changes, changes_that_fit
from ..plan.client import Planner
from ..plan.model.estimate import MemoryEstimate
from ..plan.search.ladder import Rung, Step
from ..plan.target import Target
from .phrases import BUCKETS, Tool, phrase
from .rewrite import READERS, ChangedJob, NoKey, as_mapping, change_files, without_techniques
from .translate import ForeignJob

LIMIT_S = 90.0
"""Most seconds for the plans of one post-mortem."""


def changes_in_files(
    job: ForeignJob,
    overrides: Sequence[str],
    estimate: MemoryEstimate,
    planner: Planner,
    has_checkpointing: bool = True,
) -> Changes:
    """Like `changes_that_fit`, for a job of other tools: each change that its files can express, planned in their loop.

    Args:
        overrides: settings that no file has.
        has_checkpointing: as for `phrase`.
    """
    texts: dict[str, str] = {}

    def changed(settings: Sequence[str]) -> tuple[RunConfig, Mapping[str, Any]]:
        changed_job = change_files(job, overrides, settings, has_checkpointing)
        texts[" ".join(settings)] = changed_job.text
        return changed_job.load().config, changed_job.job.loop

    changes = changes_that_fit(job.load(overrides).config, estimate, planner, changed)
    worded = Changes(replace(change, in_the_files=texts[change.settings]) for change in changes)
    for settings in changes.left_out:
        with suppress(ShardkitError):  # no key means it
            changed(settings.split(" "))
    worded.left_out = [texts[settings] for settings in changes.left_out if settings in texts]
    return worded


def climb(job: ForeignJob, overrides: Sequence[str], rungs: Sequence[Rung], target: Target) -> Iterator[Step]:
    """Predict a job of other tools: as it is, without its techniques, then each rung on top of those below it.

    A rung that no key means is refused with the reason, and those above it go on without it.

    Raises:
        ConfigError: the job's files leave something open.
        NotPlannedError: without its techniques the job is one that no plan models.
    """
    below = without_techniques(job, overrides)
    below.job.refuse_unplanned()
    plain_name = f"plain {below.load().config.parallel.strategy}"
    with Planner(target) as planner:

        def step(rung: Rung, changed: ChangedJob) -> Step:
            estimate = planner.predict(changed.load().config, loop=changed.job.loop)
            return Step(rung, rung.settings, estimate.needed, estimate.verdict, in_the_files=changed.text)

        yield step(Rung("the files as they are", ()), ChangedJob("", job, tuple(overrides)))
        yield step(Rung(plain_name, ()), below)
        postponed = tuple[str, ...]()
        for rung in rungs:
            settings = (*postponed, *rung.settings)
            try:
                changed = change_files(below.job, below.overrides, settings)
                yield step(rung, changed)
                below, postponed = changed, ()
            except NoKey as error:
                yield Step(rung, rung.settings, None, None, error.cause, in_the_files="")
            except ShardkitError as error:  # the rung above may be without what is refused here
                postponed = settings
                yield Step(rung, rung.settings, None, None, error.cause, in_the_files="")


@dataclass
class ToolKeys:
    """Words advice in a tool's keys, and plans it.

    Args:
        strategy: the engine that runs, in shardkit's word.
        has_checkpointing: as for `phrase`.
    """

    tool: Tool
    strategy: str
    has_checkpointing: bool

    def words(self, advice: list[Advice], buckets: tuple[int, int] | None = None) -> list[Advice]:
        """The advice that the tool can follow, in its keys, the largest saving first.

        Args:
            buckets: (elements that are enough for a reduce bucket of DeepSpeed, bytes saved).
        """
        worded = [
            replace(change, change=text) for change in advice if (text := self._worded(change.change)) is not None
        ]
        if buckets is not None:
            text = BUCKETS[self.tool].replace("{}", str(buckets[0]))
            reason = "DeepSpeed makes the whole bucket, though the model's gradients need less"
            worded.append(Advice(text, buckets[1], "none to speak of", reason))
        return sorted(worded, key=lambda change: -(change.saving_bytes or 0))

    def planned(self, advice: list[Advice], job: ForeignJob, target: Target, overrides: Sequence[str]) -> list[Advice]:
        """Planned changes, those that fit first and pairs if no single one does, then the rest of `advice`.

        Args:
            job: the job as other tools' files describe it.
            overrides: settings that no file has.

        Raises:
            ShardkitError: the job cannot be planned.
        """
        estimate, changes = self._changes(job, target, overrides)
        planned = []
        for change in changes:
            text, verdict = change.in_the_files or self._worded(change.settings), change.estimate.verdict
            if text is not None and verdict is not None and target.device_memory is not None:
                figures = f"planned: {gib(change.estimate.needed)} of {gib(target.device_memory)}, {verdict}"
                reason = f"{gib(estimate.needed)} are planned without it"
                planned.append(Advice(text, change.saving, change.cost, reason, figures, verdict))
        planned_texts = {change.change for change in planned}
        n_fitting = sum(change.verdict != "does not fit" for change in planned)
        unplanned = [change for change in advice if change.change not in planned_texts]
        return planned[:n_fitting] + unplanned + planned[n_fitting:]

    def _changes(
        self, job: ForeignJob, target: Target, overrides: Sequence[str]
    ) -> tuple[MemoryEstimate, list[Change]]:
        """The job's estimate, and planned changes of the job: all that `LIMIT_S` leaves time for."""
        config = job.load(overrides).config
        with Planner(target, loop=job.loop) as planner, planner.stopping_after(LIMIT_S):
            estimate = planner.predict(config)
            if self.tool in READERS:
                return estimate, changes_in_files(job, overrides, estimate, planner, self.has_checkpointing)
            return estimate, changes_that_fit(
                config, estimate, planner, lambda changes: (job.load([*overrides, *changes]).config, None)
            )

    def _worded(self, change: str) -> str | None:
        if "=" not in change or change.startswith("PYTORCH_"):
            return change
        settings = change.split(" ")
        engines = (setting.partition("=")[2] for setting in settings if setting.startswith("parallel.strategy="))
        engine, texts = next(engines, self.strategy), list[str]()
        for setting in settings:
            phrase_engine = self.strategy if setting.startswith("parallel.strategy=") else engine
            text = phrase(self.tool, setting, phrase_engine, self.has_checkpointing)
            if text is None:
                return None
            texts.append(text)
        return _joined([text for text in texts if text])


def _joined(texts: list[str]) -> str:
    """Texts as one; parts of one YAML mapping are merged: two of `deepspeed:` would not be read."""
    trees = [as_mapping(text) for text in texts]
    if len(texts) < 2 or None in trees:
        return ", ".join(texts)
    tree = reduce(merged, (tree or {} for tree in trees))
    return yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=10_000).strip()[1:-1]
