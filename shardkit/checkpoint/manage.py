"""`shardkit checkpoint`: list, verify and remove the checkpoints of a run. Imports torch only to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import CheckpointError, printable
from .native import layout
from .native.manifest import Manifest

State = Literal["complete", "damaged", "unfinished", "set aside"]


@dataclass(frozen=True)
class Entry:
    """A checkpoint folder."""

    path: Path
    state: State
    # why it is not usable; empty if it is complete, as far as one sees without reading its bytes (`verify`)
    problem: str = ""
    manifest: Manifest | None = None
    is_latest: bool = False  # a resume would take this checkpoint
    is_best: bool = False  # it has the lowest validation loss of the complete checkpoints


def folder(run: Path) -> Path:
    """The checkpoints folder of a run directory, or `run` itself if it is such a folder."""
    for root in (run / "checkpoints", run):
        if root.is_dir() and any(layout.step_of(p.with_suffix("")) is not None for p in root.iterdir()):
            return root
    if not run.is_dir():
        raise CheckpointError(f"{run} is not a directory", "name the run.dir of a run")
    raise CheckpointError(f"{run} holds no checkpoint", "name the run.dir of a run that saved one")


def entries(run: Path) -> list[Entry]:
    """Every checkpoint of a run, oldest first, judged by its manifest and file sizes."""
    root = folder(run)
    complete = layout.checkpoints(root)
    best = layout.best_of(complete)
    folders = [
        _entry(p, p == best) for p in root.iterdir() if p.is_dir() and layout.step_of(p.with_suffix("")) is not None
    ]
    usable = [e for e in folders if e.state == "complete"]
    newest = max(usable, key=_age, default=None)
    marked = [Entry(**{**vars(e), "is_latest": e is newest}) for e in folders]
    return sorted(marked, key=_age)


def _age(entry: Entry) -> tuple[int, str]:
    """A key that sorts entries by step; folders' names do not, as they have 8 digits or more."""
    return layout.step_of(entry.path.with_suffix("")) or 0, entry.path.name


def _entry(path: Path, is_best: bool) -> Entry:
    if path.suffix in (layout.CORRUPT, layout.SUPERSEDED):
        return Entry(path, "set aside", f"by a resume: {path.suffix[1:]}")
    if path.suffix:
        return Entry(path, "unfinished", "left by a crash, or being written: the next run sweeps it")
    try:
        manifest = layout.read_manifest(path)
        layout.check_files(path, manifest)
    except CheckpointError as error:
        return Entry(path, "damaged", error.cause)
    return Entry(path, "complete", manifest=manifest, is_best=is_best)


def table(listed: Sequence[Entry]) -> str:
    """A table of the entries as text, with one line for each."""
    lines = [f"{'name':<24} {'state':<11} {'made by':<12} {'GiB':>8} {'val loss':>9}  {'created':<24} note"]
    for e in listed:
        m = e.manifest
        made_by = f"{m.strategy} × {m.world_size}" if m else ""
        size = f"{m.n_bytes / 2**30:.3f}" if m else ""
        loss = f"{m.run.val_loss:.4f}" if m and m.run.val_loss is not None else ""
        notes = [name for name, marked in (("latest", e.is_latest), ("best", e.is_best)) if marked] + [e.problem]
        note = ", ".join(n for n in notes if n)
        created = m.created if m else ""
        line = f"{e.path.name:<24} {e.state:<11} {made_by:<12} {size:>8} {loss:>9}  {created:<24} {note}"
        lines.append(printable(line.rstrip()))
    return "\n".join(lines)


def select(run: Path, names: Sequence[str]) -> list[Path]:
    """The checkpoint folders with these step numbers or folder names."""
    root = folder(run)
    chosen = []
    for name in names:
        path = root / (layout.folder_name(int(name)) if name.isdecimal() else name)
        if path.parent != root or layout.step_of(path.with_suffix("")) is None or not path.is_dir():
            available = ", ".join(e.path.name for e in entries(run))
            raise CheckpointError(f"{root} has no checkpoint {name}", f"name a step or one of: {available}")
        chosen.append(path)
    return chosen


def verify(path: Path) -> list[str]:
    """Read a whole checkpoint and compare every checksum; returns the problems, none if it is intact."""
    from .native.reader import CheckpointReader

    try:
        with CheckpointReader(path) as checkpoint:
            return list(checkpoint.problems())
    except CheckpointError as error:
        return [error.cause]


def remove(run: Path, paths: Sequence[Path], force: bool = False) -> None:
    """Delete checkpoints."""
    remaining = [e for e in entries(run) if e.state == "complete" and e.path not in paths]
    if not remaining and not force:
        raise CheckpointError(f"{run} would be left without a checkpoint to resume from", "add --force to delete all")
    root = folder(run)
    try:
        for path in paths:
            layout.remove(path)
        layout.point_latest(root)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be deleted: {error.strerror}", "check its owner") from error


def size_of(path: Path) -> int:
    """Bytes of all files of a checkpoint folder."""
    return sum(p.stat().st_size for p in path.iterdir() if p.is_file())
