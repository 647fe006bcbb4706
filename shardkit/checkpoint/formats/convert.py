"""`shardkit convert`: turn any checkpoint into any target format, a piece of a tensor at a time, all or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import CheckpointError
from ..native.layout import fsync_folder
from ..native.manifest import CorruptCheckpoint
from ..native.writer import check_space
from . import targets
from .adapter import SavedAdapter, merged, saved_adapter, write_peft
from .detect import open_source
from .hub_names import reference_of, ties_of
from .targets import ModelInfo, model_info
from .tensor_source import Source

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
    limit, cast = targets.parse_size(max_shard_size), targets.DTYPES[dtype] if dtype else None
    _refuse_used(out)
    try:
        source = open_source(path, step, weights_only or not (to == "shardkit" or average))
        try:
            info = ModelInfo()
            if source.kind == "shardkit" and to != "shardkit":
                info = model_info(path, source.path)
            notes = [*source.notes, *([info.note] if info.note else [])]
            adapter = saved_adapter(source)
            _check_adapter(source, adapter, to, merge, base)
            if adapter is not None and merge:
                if info.pretrained is None or not info.frozen:
                    raise CheckpointError(
                        f"{source.path} cannot be merged: {info.note or 'its run trains no adapter'}",
                        "convert it where it was saved, in its run",
                    )
                plain = reference_of(info.pretrained)
                info = replace(info, pretrained=plain, ties=ties_of(plain))
                source = merged(source, adapter, base, plain, list(info.frozen), cast)
            weights = targets.exported(source, cast, info, average)
            if to == "safetensors":
                weights, unusual = targets.as_published(weights, info)
                notes += unusual if cast is not None else [*unusual, *targets.other_type(weights, info)]
            sizes = source.tensors if to == "shardkit" and cast is None else weights.tensors
            needed = sum(map(targets.size_of, sizes.values()))
            with _draft(out, needed) as folder:
                if to == "safetensors":
                    targets.write_safetensors(weights, folder, limit)
                    notes += targets.write_rest(weights, info, folder)
                elif to == "peft":
                    assert adapter is not None
                    write_peft(source, adapter, folder, cast, info.pretrained)
                elif to == "torch":
                    targets.write_torch(weights, folder)
                else:
                    targets.write_shardkit(source, folder, cast)
        finally:
            source.close()
    except CorruptCheckpoint as error:
        raise CheckpointError(error.cause, error.fix or "pass another checkpoint with --step") from error
    files = sorted(p for p in out.rglob("*") if p.is_file())
    return Converted(source.path, source.kind, len(sizes), sum(p.stat().st_size for p in files), files, notes)


def _check_adapter(source: Source, adapter: SavedAdapter | None, to: str, merge: bool, base: Path | None) -> None:
    """Refuse what does not suit a checkpoint that holds an adapter, or one that holds none."""
    if adapter is None and (merge or base is not None or to == "peft"):
        asked = "--to peft" if to == "peft" else "--merge" if merge else "--base"
        raise CheckpointError(f"{asked}, but {source.path} holds no adapter", "name a run with adapter.type=lora")
    if adapter is not None and merge and to in ("shardkit", "peft"):
        raise CheckpointError(f"--merge with --to {to}: it writes a model", "pass --to safetensors or --to torch")
    if adapter is not None and not merge and to in ("safetensors", "torch"):
        raise CheckpointError(
            f"{source.path} holds an adapter, not the model under it", "pass --merge for both, or --to peft"
        )
    if base is not None and not merge:
        raise CheckpointError("--base is for --merge", "pass --merge, or leave --base out")


def _refuse_used(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise CheckpointError(f"--out {out} {what}", "name a new or empty directory")


@contextmanager
def _draft(out: Path, needed: int) -> Iterator[Path]:
    """A folder that becomes `out` at the end, or vanishes.

    Raises:
        CheckpointError: no space, or no permission to write there.
    """
    draft: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_space(out.parent, needed)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        draft.chmod(0o777 & ~_umask())
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
