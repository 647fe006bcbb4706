"""Recognise the kind of checkpoint at a path, and open it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError
from ..native import layout
from ..native.manifest import FILE_NAME
from ..native.reader import CheckpointReader
from ..resume import candidates
from .dcp import METADATA, open_dcp
from .deepspeed import is_deepspeed, open_deepspeed
from .tensor_source import Source
from .weight_files import SAFETENSORS_INDEX, SUFFIXES, is_torch_folder, open_safetensors, open_torch

KINDS = (
    "a run directory, a shardkit checkpoint, a safetensors file or folder, a torch.save file, "
    "a DeepSpeed global_step folder or a folder of torch.distributed.checkpoint"
)


def open_source(path: Path, step: str = "latest", weights_only: bool = False) -> Source:
    """Open the checkpoint at `path`.

    `step`: which checkpoint to open if `path` is a run or a DeepSpeed folder with several: a step, `latest`, or `best`
    (runs only). `weights_only`: leave optimizer state out.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", f"name {KINDS}")
    chosen, open_chosen = opener(path, step)
    source = open_chosen(chosen, weights_only)
    if not any(name.startswith("model.") for name in source.tensors):
        source.close()
        raise CheckpointError(f"{path} holds no weights", f"name {KINDS}")
    if not weights_only:
        return source
    weights = {name: spec for name, spec in source.tensors.items() if name.startswith(("model.", "buffer."))}
    return replace(source, tensors=weights, scalars={})


def opener(path: Path, step: str = "latest") -> tuple[Path, Callable[[Path, bool], Source]]:
    """The file or folder to open for `path`, and the function that opens its kind; looks only at names of files."""
    if not path.is_file() and not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a directory", f"name {KINDS}")
    chosen = _chosen(path, step)
    if chosen.is_file():
        if chosen.suffix == ".safetensors":
            return chosen, lambda file, _: open_safetensors(file)
        if chosen.suffix in SUFFIXES:
            return chosen, lambda file, _: open_torch(file)
        raise CheckpointError(
            f"{chosen} has none of the suffixes that shardkit knows: .safetensors, {', '.join(SUFFIXES)}",
            f"name {KINDS}",
        )
    for recognises, open_folder in FOLDERS:
        if recognises(chosen):
            return chosen, open_folder
    if (chosen / "config.json").is_file():
        raise CheckpointError(f"no *.safetensors in {path}, only the model's description", "copy the weights there")
    raise CheckpointError(f"{path} holds no checkpoint that shardkit knows", f"name {KINDS}")


FOLDERS: tuple[tuple[Callable[[Path], bool], Callable[[Path, bool], Source]], ...] = (
    (
        lambda folder: (folder / FILE_NAME).exists() or layout.step_of(folder) is not None,
        lambda folder, _: _open_shardkit(folder),
    ),
    (lambda folder: (folder / METADATA).exists(), open_dcp),
    (is_deepspeed, open_deepspeed),
    (
        lambda folder: (folder / SAFETENSORS_INDEX).exists() or any(folder.glob("*.safetensors")),
        lambda folder, _: open_safetensors(folder),
    ),
    (is_torch_folder, lambda folder, _: open_torch(folder)),
)
"""The kinds of folders: a function that recognises one, and one that opens it, with or without optimizer state."""


def _chosen(path: Path, step: str) -> Path:
    """The checkpoint folder that `step` selects, if `path` holds several; otherwise `path` itself."""
    saved = [] if path.is_file() else [p for p in candidates(path) if p != path]
    if saved and step == "latest":
        return saved[0]
    if saved and step == "best":
        best = layout.best_of(saved)
        if best is None:
            raise CheckpointError(f"no checkpoint of {path} was evaluated, so none is the best", "name a step")
        return best
    if saved:
        matching = [p for p in saved if step.isdecimal() and layout.step_of(p) == int(step)]
        if not matching:
            steps = ", ".join(str(layout.step_of(p)) for p in reversed(saved))
            fix = f"pass --step latest, best, or one of {steps}"
            raise CheckpointError(f"{path} has no checkpoint of step {step}", fix)
        return matching[0]
    tags = {p.name: p for p in path.glob("global_step*") if p.is_dir()}
    if tags:
        latest = path / layout.LATEST  # DeepSpeed's file of the same name
        text = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
        tag_name = text if step == "latest" else f"global_step{step}"
        if tag_name not in tags:
            raise CheckpointError(
                f"{path} has no checkpoint {tag_name or 'that a file `latest` names'}",
                f"name one with --step, or its folder: {', '.join(sorted(tags))}",
            )
        return tags[tag_name]
    if step != "latest":
        raise CheckpointError(f"--step {step}, but {path} does not hold several checkpoints", "leave --step out")
    return path


def _open_shardkit(path: Path) -> Source:
    """A checkpoint of shardkit as a source, without the states of random generators."""
    reader = CheckpointReader(path)
    manifest = reader.manifest
    tensors = {n: spec for n, spec in reader.tensors().items() if not n.startswith("rng.")}
    return Source(
        "shardkit", path, tensors, reader.read_into, reader.close,
        scalars=dict(manifest.scalars), step=manifest.run.step, run=manifest.run,
    )  # fmt: skip
