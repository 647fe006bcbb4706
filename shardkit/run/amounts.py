"""How much data a run has, how many passes its steps make, and which samples each step reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..config.load import resolve_batch
from ..config.schema import RunConfig, TrainConfig
from ..data.loader import StepLoader
from ..data.order import BatchSchedule, Order, State
from ..data.pack import PackedDocuments
from ..data.text_data import Mixed, Samples, Streamed
from ..data.windows import DocumentWindows, MaskedWindows, Windows
from ..errors import DataError
from ..parallel.world import World
from ..tasks.base import Dataset, Task

MANY_PASSES = 20
"""More passes over the data get a warning."""
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Amount:
    """A data set's size."""

    n: int  # the number of what its source holds: conversations, documents, rows
    noun: str  # the name of what is counted
    tokens: int | None = None  # None if the data have none, or nobody has counted them


def amount(data: Dataset) -> Amount:
    """Count what a data set was made of."""
    if isinstance(data, MaskedWindows):
        return amount(data.windows)
    if isinstance(data, Mixed):
        parts = [amount(part) for part in data.parts]
        nouns = {part.noun for part in parts}
        counted = [part.tokens for part in parts if part.tokens is not None]
        noun = nouns.pop() if len(nouns) == 1 else "documents"
        return Amount(sum(part.n for part in parts), noun, sum(counted) if len(counted) == len(parts) else None)
    if isinstance(data, Streamed):
        return Amount(len(data), "rows")
    if isinstance(data, Windows):
        return Amount(len(data), f"windows of {data.seq_len} tokens", len(data.span))
    if isinstance(data, PackedDocuments | DocumentWindows | Samples):
        source, tokens = data.documents, data.n_tokens if isinstance(data, PackedDocuments) else data.documents.n_tokens
        counts = getattr(source, "long", None)
        n = len(source.lengths) if counts is None else counts.documents
        return Amount(n, getattr(source, "noun", "documents"), tokens)
    return Amount(len(data), "samples")


def val_parts(task: Task) -> dict[str, Dataset]:
    """The validation data in parts by name, such as the sources of a mix; one part without a name otherwise."""
    parts: dict[str, Dataset] = getattr(task, "val_parts", dict)()
    if parts:
        return parts
    split = task.dataset("val")
    return {} if split is None else {"": split}


def describe_split(config: RunConfig, data: Dataset, val_parts: Mapping[str, Dataset]) -> str:
    """One line: how many of the data train, how many validate, and the setting that decides it."""
    train, val = amount(data), [amount(part) for part in val_parts.values()]
    if not config.train.eval_samples:
        return f"data: all {train.n:,} {train.noun} train (train.eval_samples=0: no evaluation)"
    if not val:
        return f"data: {train.n:,} {train.noun} train, none validate"
    reason = f"data.val_fraction={config.data.val_fraction:g}; train.eval_samples=0 trains on all"
    if config.task.factory is not None:  # the task itself splits its data
        reason = "train.eval_samples=0: no evaluation"
    elif config.data.val_path is not None:
        reason = f"data.val_path={config.data.val_path}"
    elif any(part.documents.choice.split is None for part in val_parts.values() if isinstance(part, Samples)):
        reason = "the validation split of data.path"
    elif config.task.name == "image_classification" and config.data.path is None:
        reason = "the lower part of scikit-image's pictures"
    noun = "" if val[0].noun == train.noun else f" {val[0].noun}"
    return f"data: {train.n:,} {train.noun} train, {sum(part.n for part in val):,}{noun} validate ({reason})"


def last_step(train: TrainConfig, schedule: BatchSchedule, step: int, at: State) -> int:
    """The run's last step: `train.max_steps`, or earlier the step that completes `train.epochs`.

    `step`: steps that were taken before, perhaps on another number of ranks. `at`: the position in the data after them.
    """
    if train.epochs is None:
        return train.max_steps
    passes_done = at.epoch + at.next_sample / schedule.n_samples
    to_go = math.ceil((train.epochs - passes_done) * schedule.steps_per_epoch - _ROUNDING)
    return min(train.max_steps, max(1, step + max(0, to_go)))


def describe_passes(data: Dataset, schedule: BatchSchedule, steps: int) -> str:
    """One line: the samples, tokens and steps of a pass, and the passes of the run's steps."""
    counted, per_pass = amount(data), schedule.steps_per_epoch
    tokens = "" if counted.tokens is None else f"{counted.tokens:,} tokens, "
    n_samples = schedule.n_samples
    passes = f"{steps / per_pass:,.1f}".removesuffix(".0")
    if steps < per_pass:
        passes = f"{steps / per_pass:.2g} of a pass"
    else:
        passes += f" pass{'es' * (passes != '1')}"
    return (
        f"a pass: {n_samples:,} samples, {tokens}{per_pass:,} step{'s' * (per_pass > 1)}; {steps:,} "
        f"step{'s' * (steps > 1)} {'are' if steps > 1 else 'is'} {passes}"
    )


def doubt(train: TrainConfig, schedule: BatchSchedule) -> str | None:
    """A warning about steps that repeat the data more often than anybody means to; None for passes that are named."""
    passes = train.max_steps / schedule.steps_per_epoch
    if train.epochs is not None or passes <= MANY_PASSES:
        return None
    return (
        f"train.max_steps={train.max_steps} takes each sample {passes:,.0f} times: name the passes instead, such as "
        f"train.epochs=3, or set train.max_steps={3 * schedule.steps_per_epoch}"
    )


def without_validation(config: RunConfig) -> RunConfig:
    """The config for the data of a run that never evaluates: nothing is held out."""
    if config.train.eval_samples:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"val_fraction": 0.0})})


def make_schedule(config: RunConfig, world: World, samples: Dataset) -> BatchSchedule:
    """Divide the training split into the micro-batches of steps and ranks."""
    train, data, accum = config.train, config.data, resolve_batch(config, world.size)
    if train.micro_batch_size > len(samples):
        raise DataError(
            f"train.micro_batch_size={train.micro_batch_size} is more than the {len(samples)} samples of the "
            "training split",
            f"set it to {max(1, len(samples) // (accum * world.size))} or less, or use more data",
        )
    make_order = getattr(samples, "order", None)
    order: Order | None = make_order(train.seed, data.shuffle) if callable(make_order) else None
    try:
        return BatchSchedule(
            n_samples=len(samples) if order is None else order.n,
            global_batch=train.micro_batch_size * accum * world.size,
            micro_batch=train.micro_batch_size,
            accum=accum,
            rank=world.rank,
            world=world.size,
            seed=train.seed,
            shuffle=data.shuffle,
            drop_last=data.drop_last,
            order=order,
        )
    except ValueError as error:
        raise DataError(
            f"the training split cannot fill a step: {error}", "use more data, or smaller batches"
        ) from error


def make_loader(
    config: RunConfig, world: World, task: Task, samples: Dataset, schedule: BatchSchedule, state: State, n_steps: int
) -> StepLoader:
    """Read `n_steps` steps from the position `state` on."""
    return StepLoader(
        samples,
        schedule,
        getattr(task, "collate", None),
        state=state,
        n_steps=n_steps,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        pin_memory=world.device.type == "cuda",
    )
