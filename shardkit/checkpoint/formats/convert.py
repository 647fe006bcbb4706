"""`shardkit convert`: turn any checkpoint into any target format, a piece of a tensor at a time, all or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import CheckpointError
from ..native.layout import fsync_folder
from ..native.manifest import CorruptCheckpoint
from ..native.writer import check_space
from . import targets
from .adapter import merged, saved_adapter, write_peft
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
    """The result of a conversion."""

    source: Path  # the checkpoint that was read
    kind: str
    n_tensors: int
    n_bytes: int
    files: list[Path]  # the files that were written, sorted
    notes: list[str]  # the parts that were left out, one line each


def convert(
    path: Path,
    to: str,  # one of `TARGETS`
    out: Path,
    *,
    max_shard_size: str = "5GB",  # largest size of a safetensors file
    dtype: str | None = None,  # `fp32`, `bf16` or `fp16` for weights; None keeps theirs
    step: str = "latest",  # which checkpoint of a run; see `open_source`
    weights_only: bool = False,  # leave optimizer state behind (only `shardkit` can hold it)
    average: bool = False,  # export the moving average instead of the weights (not for `shardkit`)
    merge: bool = False,  # add an adapter to the weights it was trained on, and write the whole model
    base: Path | None = None,  # where these weights are; None = where the run read them
) -> Converted:
    """Convert the checkpoint at `path` and write it to the new or empty folder `out`."""
    if to not in TARGETS:
        raise CheckpointError(f"--to {to!r} is not a format", f"pass one of {', '.join(TARGETS)}")
    if dtype is not None and dtype not in targets.DTYPES:
        raise CheckpointError(f"--dtype {dtype!r} is not a type", f"pass one of {', '.join(targets.DTYPES)}")
    if average and to == "shardkit":
        raise CheckpointError("--ema with --to shardkit: a checkpoint holds both", "leave --ema out")
    cast, max_shard = targets.DTYPES[dtype] if dtype else None, targets.parse_size(max_shard_size)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problem = "is not empty" if out.is_dir() else "is a file"
        raise CheckpointError(f"--out {out} {problem}", "name a new or empty directory")
    source: Source | None = None
    try:
        source = open_source(path, step, weights_only or not (to == "shardkit" or average))
        facts = model_facts(path, source.path) if source.kind == "shardkit" and to != "shardkit" else ModelFacts()
        notes = [*source.notes, *([facts.note] if facts.note else [])]
        adapter = saved_adapter(source)
        if adapter is None and (merge or base is not None or to == "peft"):
            option = "--to peft" if to == "peft" else "--merge" if merge else "--base"
            raise CheckpointError(f"{option}, but {source.path} holds no adapter", "name a run with adapter.type=lora")
        if adapter is not None and merge and to in ("shardkit", "peft"):
            raise CheckpointError(f"--merge with --to {to}: it writes a model", "pass --to safetensors or --to torch")
        if adapter is not None and not merge and to in ("safetensors", "torch"):
            fix = "pass --merge for both, or --to peft"
            raise CheckpointError(f"{source.path} holds an adapter, not the model under it", fix)
        if base is not None and not merge:
            raise CheckpointError("--base is for --merge", "pass --merge, or leave --base out")
        if adapter is not None and merge:
            if facts.pretrained is None or not facts.frozen:
                raise CheckpointError(
                    f"{source.path} cannot be merged: {facts.note or 'its run trains no adapter'}",
                    "convert it where it was saved, in its run",
                )
            plain = reference_of(facts.pretrained)
            source = merged(source, adapter, base, plain, list(facts.frozen), cast)
            facts = replace(facts, pretrained=plain, ties=ties_of(plain))
            notes += [_OF_QUANTIZED] * adapter.quantized
        export = targets.exported(source, cast, facts, average)
        if to == "safetensors":
            export, deviations = targets.as_published(export, facts)
            notes += [*deviations, *(targets.other_type(export, facts) if cast is None else [])]
        written = source.tensors if to == "shardkit" and cast is None else export.tensors
        with _draft(out, sum(map(targets.size_of, written.values()))) as folder:
            if to == "safetensors":
                targets.write_safetensors(export, folder, max_shard)
                notes += targets.write_rest(export, facts, folder)
            elif to == "peft":
                assert adapter is not None
                write_peft(source, adapter, folder, cast, facts.pretrained)
            elif to == "torch":
                targets.write_torch(export, folder)
            else:
                targets.write_shardkit(source, folder, cast)
    except CorruptCheckpoint as error:
        raise CheckpointError(error.cause, error.fix or "pass another checkpoint with --step") from error
    finally:
        if source is not None:
            source.close()
    files = sorted(file for file in out.rglob("*") if file.is_file())
    return Converted(source.path, source.kind, len(written), sum(file.stat().st_size for file in files), files, notes)


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
        for path in (path for path in draft.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsync_folder(draft)
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
