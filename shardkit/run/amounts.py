"""How much data a run has: what trains, what validates, and how many passes its steps make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config.schema import RunConfig
from ..data.packing import PackedDocuments
from ..data.samples import Mixed, Streamed
from ..data.windows import DocumentWindows, MaskedWindows, Samples, Windows
from ..tasks.base import Dataset


@dataclass(frozen=True)
class Amount:
    """A data set's size.

    Attributes:
        n: the number of what its source holds: conversations, documents, rows.
        noun: the name of what is counted.
        tokens: None if the data have none, or nobody has counted them.
    """

    n: int
    noun: str
    tokens: int | None = None


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
    elif config.task.name == "image_classification" and config.data.path is None:
        reason = "the lower part of scikit-image's pictures"
    noun = "" if val[0].noun == train.noun else f" {val[0].noun}"
    return f"data: {train.n:,} {train.noun} train, {sum(part.n for part in val):,}{noun} validate ({reason})"


def without_validation(config: RunConfig) -> RunConfig:
    """The config for the data of a run that never evaluates: nothing is held out."""
    if config.train.eval_samples:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"val_fraction": 0.0})})
