"""`shardkit convert`: turn any checkpoint into any target format, a piece of a tensor at a time, all or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...errors import CheckpointError
from ..native.layout import fsync_folder
from ..native.manifest import CorruptCheckpoint
from ..native.writer import check_space
from . import targets
from .adapter import SavedAdapter, merged, saved_adapter, write_peft
from .detect import open_source
from .hub_names import reference_of, ties_of
from .targets import ModelFacts, model_facts
from .tensor_source import Source

_OF_QUANTIZED = (
    "the adapter is added to the weights that the run had packed: the model differs from the run by the error of "
    "packing"
)
TARGETS = ("safetensors", "torch", "shardkit", "peft")


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        source: the checkpoint that was read.
        files: the files that were written, sorted.
        notes: the parts that were left out, one line each.
    """

    source: Path
    kind: str
    n_tensors: int
    n_bytes: int
    files: list[Path]
    notes: list[str]


def convert(
    path: Path,
    to: str,
    out: Path,
    *,
    max_shard_size: str = "5GB",
    dtype: str | None = None,
    step: str = "latest",
    weights_only: bool = False,
    average: bool = False,
    merge: bool = False,
    base: Path | None = None,
) -> Converted:
    """Convert the checkpoint at `path` and write it to the new or empty folder `out`.

    Args:
        to: `safetensors`, `torch`, `shardkit` or `peft`.
        max_shard_size: largest size of a safetensors file, such as "5GB".
        dtype: `fp32`, `bf16` or `fp16` for weights; None keeps theirs.
        step: which checkpoint of a run; see `open_source`.
        weights_only: leave optimizer state behind (only `shardkit` can hold it).
        average: export the moving average instead of the weights (not for `shardkit`).
        merge: add an adapter to the weights it was trained on, and write the whole model.
        base: where these weights are; None = where the run read them.

    Raises:
        CheckpointError: an argument is invalid, the source is missing, damaged or hostile, or `out` cannot be written;
            nothing is left behind.
    """
    if to not in TARGETS:
        raise CheckpointError(f"--to {to!r} is not a format", f"pass one of {', '.join(TARGETS)}")
    if dtype is not None and dtype not in targets.DTYPES:
        raise CheckpointError(f"--dtype {dtype!r} is not a type", f"pass one of {', '.join(targets.DTYPES)}")
    if average and to == "shardkit":
        raise CheckpointError("--ema with --to shardkit: a checkpoint holds both", "leave --ema out")
    cast = targets.DTYPES[dtype] if dtype else None
    order = _Order(to, out, targets.parse_size(max_shard_size), cast, average, merge, base)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problem = "is not empty" if out.is_dir() else "is a file"
        raise CheckpointError(f"--out {out} {problem}", "name a new or empty directory")
    try:
        source = open_source(path, step, weights_only or not (to == "shardkit" or average))
        return _convert(order, path, source)
    except CorruptCheckpoint as error:
        raise CheckpointError(error.cause, error.fix or "pass another checkpoint with --step") from error


@dataclass(frozen=True)
class _Order:
    """The checked options of a conversion; see `convert`.

    Attributes:
        max_shard: bytes of the largest safetensors file.
        cast: type of the written weights; None keeps theirs.
    """

    to: str
    out: Path
    max_shard: int
    cast: torch.dtype | None
    average: bool
    merge: bool
    base: Path | None


def _convert(order: _Order, path: Path, source: Source) -> Converted:
    """Convert an open source, and close it."""
    try:
        facts = model_facts(path, source.path) if source.kind == "shardkit" and order.to != "shardkit" else ModelFacts()
        notes = [*source.notes, *([facts.note] if facts.note else [])]
        adapter = saved_adapter(source)
        _check_adapter(source, adapter, order)
        if adapter is not None and order.merge:
            source, facts = _with_adapter(source, adapter, order, facts)
            notes += [_OF_QUANTIZED] * adapter.quantized
        export = targets.exported(source, order.cast, facts, order.average)
        if order.to == "safetensors":
            export, deviations = targets.as_published(export, facts)
            notes += deviations
            notes += targets.other_type(export, facts) if order.cast is None else []
        written = source.tensors if order.to == "shardkit" and order.cast is None else export.tensors
        with _draft(order.out, sum(map(targets.size_of, written.values()))) as folder:
            notes += _write(order, source, export, adapter, facts, folder)
    finally:
        source.close()
    files = sorted(file for file in order.out.rglob("*") if file.is_file())
    n_bytes = sum(file.stat().st_size for file in files)
    return Converted(source.path, source.kind, len(written), n_bytes, files, notes)


def _with_adapter(source: Source, adapter: SavedAdapter, order: _Order, facts: ModelFacts) -> tuple[Source, ModelFacts]:
    """A source of the model with the adapter added to its weights, and the facts about that model."""
    if facts.pretrained is None or not facts.frozen:
        raise CheckpointError(
            f"{source.path} cannot be merged: {facts.note or 'its run trains no adapter'}",
            "convert it where it was saved, in its run",
        )
    plain = reference_of(facts.pretrained)
    model = merged(source, adapter, order.base, plain, list(facts.frozen), order.cast)
    return model, replace(facts, pretrained=plain, ties=ties_of(plain))


def _write(
    order: _Order, source: Source, export: targets.Export, adapter: SavedAdapter | None, facts: ModelFacts, folder: Path
) -> list[str]:
    """Write the files of the target format to `folder`; returns notes about parts that are left out."""
    if order.to == "safetensors":
        targets.write_safetensors(export, folder, order.max_shard)
        return targets.write_rest(export, facts, folder)
    if order.to == "peft":
        assert adapter is not None
        write_peft(source, adapter, folder, order.cast, facts.pretrained)
    elif order.to == "torch":
        targets.write_torch(export, folder)
    else:
        targets.write_shardkit(source, folder, order.cast)
    return []


def _check_adapter(source: Source, adapter: SavedAdapter | None, order: _Order) -> None:
    """Refuse options that do not suit a checkpoint with an adapter, or one without."""
    to, merge, base = order.to, order.merge, order.base
    if adapter is None and (merge or base is not None or to == "peft"):
        option = "--to peft" if to == "peft" else "--merge" if merge else "--base"
        raise CheckpointError(f"{option}, but {source.path} holds no adapter", "name a run with adapter.type=lora")
    if adapter is not None and merge and to in ("shardkit", "peft"):
        raise CheckpointError(f"--merge with --to {to}: it writes a model", "pass --to safetensors or --to torch")
    if adapter is not None and not merge and to in ("safetensors", "torch"):
        raise CheckpointError(
            f"{source.path} holds an adapter, not the model under it", "pass --merge for both, or --to peft"
        )
    if base is not None and not merge:
        raise CheckpointError("--base is for --merge", "pass --merge, or leave --base out")


@contextmanager
def _draft(out: Path, needed: int) -> Iterator[Path]:
    """Yield a new folder that is renamed to `out` on success, and removed after an error."""
    draft: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_space(out.parent, needed)
        draft = out.parent / f".{out.name}.{os.urandom(6).hex()}.partial"
        draft.mkdir()
        yield draft
        _sync(draft)
        draft.rename(out)
        fsync_folder(out.parent)
        draft = None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise CheckpointError(
            f"--out {out} cannot be written: {error.strerror or error}",
            "free space, or write to another disk" if full else "name a directory you can write",
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Sync a folder's files and their names to disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)
