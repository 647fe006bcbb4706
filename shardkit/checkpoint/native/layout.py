"""The names in a checkpoints folder, and the renames that complete or delete a checkpoint. Rank 0 alone does them.

checkpoints/
  step_00000123/          complete: renamed to this name when all its bytes were on disk
  step_00000123.tmp/      being written, or left by a crash; `sweep` deletes it
  step_00000123.old/      replaced by a new save; `sweep` puts it back if a crash left no successor
  step_00000123.deleted/  being deleted; `sweep` deletes what a crash left
  step_00000123.corrupt/, .superseded/  set aside by a resume: no longer a checkpoint, but there for inspection
  latest                  name of the newest complete checkpoint, for scripts
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from ...errors import CheckpointError
from ...files import read_regular, write_whole
from .manifest import FILE_NAME, CorruptCheckpoint, Manifest, parse

LATEST = "latest"
TMP, OLD, DELETED = ".tmp", ".old", ".deleted"
CORRUPT, SUPERSEDED = ".corrupt", ".superseded"
_LATEST_DRAFT = re.compile(rf"{LATEST}\.part[0-9a-f]{{12}}")
_STEP = re.compile(r"step_(\d{8,})")
_LOG = logging.getLogger(__name__)


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's folder name; `None` for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def checkpoints(root: Path) -> list[Path]:
    """The folders whose names say that they are complete checkpoints, newest first."""
    if not root.is_dir():
        return []
    folders = [p for p in root.iterdir() if step_of(p) is not None and p.is_dir()]
    return sorted(folders, key=lambda p: step_of(p) or 0, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint folder; CorruptCheckpoint if it is missing or damaged."""
    file = path / FILE_NAME
    try:
        content = read_regular(file)
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{path} has no {FILE_NAME}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", "check its owner and mode") from error
    return parse(content, str(file))


def check_files(path: Path, manifest: Manifest) -> None:
    """Check that every data file exists and is as long as the manifest says. Their bytes are not read."""
    for file in manifest.files:
        data = path / file.name
        try:
            size = data.stat().st_size
        except OSError as error:
            raise CorruptCheckpoint(f"{data} is missing: {error.strerror}") from error
        if size != file.size:
            raise CorruptCheckpoint(f"{data} has {size} bytes, the manifest says {file.size}")


def sweep(root: Path) -> None:
    """Clean up after a crash: delete drafts, bring back a replaced folder whose successor is missing."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        base, suffix = path.with_suffix(""), path.suffix
        if _LATEST_DRAFT.fullmatch(path.name):
            path.unlink()
        if step_of(base) is None:
            continue
        if suffix == OLD and not base.exists():
            path.rename(base)
        elif suffix in (TMP, OLD, DELETED):
            shutil.rmtree(path)
    fsync_folder(root)


def publish(draft: Path, final: Path) -> None:
    """Rename a finished draft to a checkpoint; it replaces an earlier checkpoint of that name."""
    old = final.with_suffix(OLD)
    if final.exists():
        renamed(final, OLD)
    draft.rename(final)
    fsync_folder(final.parent)
    if old.exists():
        shutil.rmtree(old)


def point_latest(root: Path) -> None:
    """Make `latest` name the newest complete checkpoint."""
    newest = checkpoints(root)
    target = root / LATEST
    if not newest:
        target.unlink(missing_ok=True)
        return
    content = newest[0].name + "\n"
    if not target.is_file() or target.read_bytes() != content.encode():
        write_whole(target, content, durable=True)
        fsync_folder(root)


def remove(path: Path) -> None:
    """Delete a checkpoint so that a crash halfway leaves no folder that looks like one."""
    shutil.rmtree(renamed(path, DELETED))


def renamed(path: Path, suffix: str) -> Path:
    """Give a folder another suffix, in place of any folder of that name; returns its new path."""
    target = path.with_suffix(suffix)
    if target.exists():
        shutil.rmtree(target)
    return path.rename(target)


def prune(root: Path, keep_last: int | None, keep_best: bool) -> list[Path]:
    """Delete all checkpoints but the newest `keep_last` and, with `keep_best`, the one with the lowest validation loss.
    Returns the deleted checkpoints."""
    if keep_last is None:
        return []
    doomed = checkpoints(root)[keep_last:]
    if keep_best and doomed and (best := best_of(checkpoints(root))) in doomed:
        doomed.remove(best)
    for path in doomed:
        remove(path)
    return doomed


def best_of(paths: list[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss; `None` if none was evaluated."""
    losses: dict[Path, float] = {}
    for path in paths:
        try:
            loss = read_manifest(path).run.val_loss
        except CheckpointError as error:
            _LOG.warning("%s", error.cause)
            continue
        if loss is not None:
            losses[path] = loss
    return min(losses, key=losses.__getitem__) if losses else None


def fsync_folder(path: Path) -> None:
    """Sync a folder's entries (creations, renames) to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
