"""Write a source as safetensors shards, a torch state dict, or a shardkit checkpoint."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...config.load import load_config
from ...config.schema import RunConfig
from ...errors import CheckpointError, ConfigError, ShardkitError
from ...parallel.weights import parameters_on_meta
from ...tasks.load import load_task
from ..native.layout import read_manifest
from ..native.manifest import FILE_NAME, Chunk, DataFile, Manifest, RunState, TensorEntry, dump
from ..native.reader import TensorSpec
from ..native.writer import byte_view, data_file_name, dtype_name, stamp, write_file
from .folder import copy_tokenizer, folder_dtype, write_card, write_configs
from .hub_names import Region, published, reference_of, ties_of
from .tensor_source import Source
from .weight_files import SAFETENSORS_INDEX, header_of


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a run's model, which is built on the meta device for them."""

    # further name of a tied parameter → the name under which it is saved
    ties: dict[str, str] = field(default_factory=dict)
    # path of the transformers model in the task's module, with a dot; empty if it is the module itself
    prefix: str = ""
    pretrained: Any = None  # the transformers model, for its config; `None` for any other model
    # names that the parameters under an adapter have in the model without it; empty without an adapter
    frozen: tuple[str, ...] = ()
    config: RunConfig | None = None  # the run's config, if there is a run
    run: Path = Path()  # the run's directory
    is_named: bool = False  # whether the user named this directory, not a checkpoint in it
    note: str = ""  # why the facts are missing; empty if they are not


def model_facts(path: Path, checkpoint: Path) -> ModelFacts:
    """Build the run's model on the meta device and collect facts about it, or note why it cannot be built.

    `path`: the path that the user named. The config's `task.factory` is imported only if this is the run directory.
    `checkpoint`: the checkpoint folder that was chosen at this path.
    """
    # The run of a checkpoint at RUN/checkpoints/step_…. Links are not followed, and no other directory counts: a config
    # that merely lies near a checkpoint may be a stranger's, and a config is code.
    run = checkpoint.absolute().parent.parent
    if checkpoint.absolute().parent.name != "checkpoints" or not (run / "config.yaml").is_file():
        return ModelFacts(note="it is not in a run's checkpoints/, so tied names and config.json are left out")
    config, is_named = run / "config.yaml", run == path.absolute()
    try:
        loaded = load_config(config).config
        if loaded.task.factory is not None and not is_named:
            return ModelFacts(
                note=f"{config} names code (task.factory={loaded.task.factory}), which is imported only if the run is "
                f"named (shardkit convert {run} --step …): tied names and config.json are left out"
            )
        # The model as its files hold it: a quantised run packs weights unless the files do, and only packed experts can
        # have an adapter.
        without = {"model": {"quantize": None}, "adapter": {"type": "none"}}
        plain = {section: getattr(loaded, section).model_copy(update=keys) for section, keys in without.items()}
        try:
            task = load_task(loaded.model_copy(update=plain))
        except ConfigError:
            if loaded.model.quantize is None:
                raise
            task = load_task(loaded)
        with parameters_on_meta():
            model = task.build_model()
    except ShardkitError as error:
        return ModelFacts(note=f"the model cannot be built, so tied names and config.json are left out: {error.cause}")
    except Exception as error:  # a user's own code
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return ModelFacts(note=f"the model cannot be built, so tied names and config.json are left out: {problem}")
    prefix, pretrained = "", None
    transformers: Any = sys.modules.get("transformers")  # a model of it cannot exist unless it was imported
    for name, module in model.named_modules() if transformers is not None else ():
        if isinstance(module, transformers.PreTrainedModel):
            prefix = f"{name}." if name else ""
            has_all = all(fqn.startswith(prefix) for fqn, _ in model.named_parameters())
            prefix, pretrained = (prefix, module) if has_all else ("", None)
            break
    adapter = getattr(task, "adapter", None)
    names = [fqn if adapter is None else adapter.base_name(fqn) for fqn, _ in model.named_parameters()]
    frozen = tuple(name for name in names if name is not None) if adapter or loaded.adapter.type != "none" else ()
    return ModelFacts(ties_of(model), prefix, pretrained, frozen, loaded, run, is_named)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?)B", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "5GB" (powers of 1000) or "5GiB" (of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise CheckpointError(f"--max-shard-size {text!r} is not a size", "write it as 5GB or 500MiB")
    unit = match.group(2).upper()
    n_bytes = int(float(match.group(1)) * (1024 if "I" in unit else 1000) ** " KMGT".index(unit[:1] or " "))
    if n_bytes < 1:
        raise CheckpointError(f"--max-shard-size {text!r} holds nothing", "write it as 5GB or 500MiB")
    return n_bytes


@dataclass(frozen=True)
class Export:
    """Weights and buffers of a source, under the names by which they are exported."""

    source: Source
    names: dict[str, str]  # exported name → name in the source
    tensors: dict[str, TensorSpec]  # exported name → its shape and exported dtype
    ties: dict[str, str]  # further exported name of a tied weight → its exported name
    # exported name → the part that it exports of the source's tensor. A name without an entry exports the whole tensor.
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return sum(size_of(spec) for spec in self.tensors.values())

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, in the exported dtype."""
        source_name, dtype = self.names[name], self.tensors[name].dtype
        if name not in self.regions:
            yield from self.source.pieces(source_name, dtype)
            return
        starts, run = self.regions[name].runs()
        for start in starts.tolist():
            yield from self.source.range_of(source_name, start, run, dtype)


def size_of(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def exported(source: Source, dtype: torch.dtype | None, facts: ModelFacts, average: bool = False) -> Export:
    """The weights and saved buffers of a source, to export under the names of the run's model.

    `dtype`: type of the floating tensors; None keeps theirs. `average`: export the moving average of the weights
    instead of the weights.
    """
    if average and not any(name.startswith("ema.") for name in source.tensors):
        raise CheckpointError(f"{source.path} holds no moving average: train.ema_decay keeps one", "leave --ema out")
    names, tensors = {}, {}
    for name, tensor in source.tensors.items():
        kind, _, fqn = name.partition(".")
        if kind not in ("ema" if average else "model", "buffer"):
            continue
        plain = fqn.removeprefix(facts.prefix)
        names[plain] = name
        cast = dtype is not None and tensor.dtype.is_floating_point
        tensors[plain] = TensorSpec(tensor.shape, dtype if cast and dtype is not None else tensor.dtype)
    ties = {**facts.ties, **source.ties}
    return Export(
        source, names, tensors, {a.removeprefix(facts.prefix): n.removeprefix(facts.prefix) for a, n in ties.items()}
    )


def as_published(weights: Export, facts: ModelFacts) -> tuple[Export, list[str]]:
    """The weights in the layout of the model's published folders, and a note on each tensor that cannot have it.

    transformers 5 fuses some tensors of a folder when it loads it (experts). Other tools read only the published form.
    """
    reference = reference_of(facts.pretrained) if facts.pretrained is not None else None
    if reference is None or any(name not in reference.state_dict() for name in weights.names):
        return weights, []
    layout = published(reference)
    if not layout.differs and not layout.unknown:
        return weights, []
    names = {
        name: weights.names[region.name] for name, region in layout.regions.items() if region.name in weights.names
    }
    tensors = {
        name: TensorSpec(layout.regions[name].shape, weights.tensors[layout.regions[name].name].dtype) for name in names
    }
    unchanged = [name for name in weights.names if name in layout.unknown]
    release = sys.modules["transformers"].__version__
    notes = [f"{name} is written as transformers {release} holds it, not as its folders do" for name in unchanged]
    names |= {name: weights.names[name] for name in unchanged}
    tensors |= {name: weights.tensors[name] for name in unchanged}
    return Export(weights.source, names, tensors, weights.ties, dict(layout.regions)), notes


def write_numbers(out: BinaryIO, weights: Export, names: Sequence[str]) -> None:
    """Write the elements of the named tensors, one tensor after the other."""
    for name in names:
        for piece in weights.pieces(name):
            out.write(byte_view(piece))


def leave_hole(out: BinaryIO, weights: Export, names: Sequence[str]) -> None:
    """Make room for the named tensors without writing: a hole of the file system, which reads as zeros."""
    out.truncate(out.tell() + sum(size_of(weights.tensors[name]) for name in names))


def write_safetensors(
    weights: Export,
    folder: Path,
    max_shard: int,
    fill: Callable[[BinaryIO, Export, Sequence[str]], None] = write_numbers,
) -> int:
    """Write Hugging Face's layout: shards of at most `max_shard` bytes (one tensor may be larger), and their index.
    `fill` writes the elements of a shard behind its header. Returns the number of shards."""
    shards = _shards(weights, max_shard)
    count, placed = len(shards), dict[str, str]()
    for index, names in enumerate(shards, 1):
        file = "model.safetensors" if count == 1 else f"model-{index:05d}-of-{count:05d}.safetensors"
        placed |= dict.fromkeys(names, file)
        with (folder / file).open("xb") as out:
            out.write(header_of((name, weights.tensors[name]) for name in names))
            fill(out, weights, names)
    if count > 1:
        saved = (name for name, source_name in weights.names.items() if not source_name.startswith("buffer."))
        n_parameters = sum(math.prod(weights.tensors[name].shape) for name in saved)
        total = {"total_size": weights.n_bytes, "total_parameters": n_parameters}
        text = json.dumps({"metadata": total, "weight_map": dict(sorted(placed.items()))}, indent=2)
        (folder / SAFETENSORS_INDEX).write_text(text + "\n")
    return count


def write_rest(weights: Export, facts: ModelFacts, folder: Path) -> list[str]:
    """Write the files beside the weights that loading and serving need; returns a note on each that is missing."""
    if facts.pretrained is None:
        return []
    dtype = next(i.dtype for i in weights.tensors.values() if i.dtype.is_floating_point)
    write_configs(facts.pretrained, facts.config, folder, dtype)
    if facts.config is None:
        return []
    write_card(read_manifest(weights.source.path), facts.config, facts.run, facts.pretrained, folder, dtype)
    lacking = copy_tokenizer(facts.config, folder, facts.is_named)
    return [lacking] if lacking else []


def other_type(weights: Export, facts: ModelFacts) -> list[str]:
    """A note if the folder from which the run started holds its weights in another type."""
    folder_type = folder_dtype(facts.config) if facts.config is not None else None
    flag = next((name for name, flag_dtype in DTYPES.items() if str(flag_dtype) == f"torch.{folder_type}"), None)
    dtype = next(i.dtype for i in weights.tensors.values() if i.dtype.is_floating_point)
    if flag is None or dtype == DTYPES[flag]:
        return []
    return [
        f"these weights are {str(dtype).removeprefix('torch.')}; "
        f"the run's model folder keeps {folder_type}: --dtype {flag}"
    ]


def _shards(weights: Export, max_bytes: int) -> list[list[str]]:
    """Divide the names among files. Within a file wider types come first, so that every array begins aligned."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in weights.tensors.items():
        if shards[-1] and filled + size_of(spec) > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size_of(spec)
    return [sorted(names, key=lambda n: -weights.tensors[n].dtype.itemsize) for names in shards]


_FIXED_HEADER, _ZIP64_EXTRA, _ALIGNMENT = 30, 20, 64


def write_torch(weights: Export, folder: Path) -> None:
    """Write all weights as one state dict, `model.pt`, with every name of a tied weight, a piece at a time.
    `torch.load(file, weights_only=True)` reads the file, also with `mmap=True`."""
    file, tensors = folder / "model.pt", weights.tensors
    # torch.save itself writes the pickle and the small entries, to a file of holes: the tensors are never touched.
    # That file cannot be filled in place: readers that look at checksums (llama.cpp's, unzip) would find wrong ones.
    layout = file.with_name(f"{file.name}.layout")
    state = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in tensors.items()}
    state.update({alias: state[name] for alias, name in weights.ties.items()})
    try:
        with torch.serialization.skip_data():
            torch.save(state, layout)
    except RuntimeError as error:  # torch's writer gives no reason; holes take no space, so the size is to blame
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(layout)) from error
    del state
    names = list(tensors)  # arrays are numbered in this order
    with zipfile.ZipFile(layout) as holes, zipfile.ZipFile(file, "x", allowZip64=True) as archive:
        for entry in holes.infolist():
            part = entry.filename.partition("/")[2]
            new = zipfile.ZipInfo(f"{file.stem}/{part}", date_time=(1980, 1, 1, 0, 0, 0))
            if part.startswith("data/"):
                # An extra field ("FB", as torch's own), which readers skip, aligns the array for a memory map.
                at = archive.start_dir + _FIXED_HEADER + len(new.filename) + _ZIP64_EXTRA + 4
                padding = -at % _ALIGNMENT
                new.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
                with archive.open(new, "w", force_zip64=True) as out:
                    for piece in weights.pieces(names[int(part.removeprefix("data/"))]):
                        out.write(byte_view(piece))
            elif not part.startswith("."):  # `.format_version` and the like promise torch's own order of bytes
                archive.writestr(new, holes.read(entry))
    layout.unlink()


def write_shardkit(source: Source, folder: Path, dtype: torch.dtype | None) -> None:
    """Write a checkpoint folder of shardkit: masters, moments, buffers and step counters, bit for bit as in the source.
    `dtype`: type of the floating tensors, allowed only without optimizer state; None keeps theirs."""
    if dtype is not None and any(name.startswith("optim.") for name in source.tensors):
        raise CheckpointError(
            "--dtype with --to shardkit, but the source has optimizer state, which is never cast",
            "leave --dtype out, or pass --weights-only",
        )
    tensors = {}
    for name, spec in source.tensors.items():
        saved_dtype = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
        dtype_name(saved_dtype)  # refuses types that a manifest does not have
        tensors[name] = TensorSpec(spec.shape, saved_dtype)
    cuts: list[tuple[str, int, int]] = []

    def pieces() -> Iterator[torch.Tensor]:
        for name, spec in tensors.items():
            start = 0
            for piece in source.pieces(name, spec.dtype):
                cuts.append((name, start, piece.numel()))
                start += piece.numel()
                yield piece

    placed = write_file(folder / data_file_name(0), pieces())
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for (name, start, length), (offset, crcs) in zip(cuts, placed, strict=True):
        chunks[name].append(Chunk(start, length, 0, offset, crcs))
    (folder / FILE_NAME).write_bytes(dump(_manifest(source, folder, tensors, chunks)))


def _manifest(
    source: Source, folder: Path, tensors: Mapping[str, TensorSpec], chunks: Mapping[str, list[Chunk]]
) -> Manifest:
    """The folder's manifest. It has no data position of another tool, so a run that resumes starts its data over."""
    data_file = data_file_name(0)
    return Manifest(
        run=source.run or RunState(step=source.step, extra={"imported": source.kind}),
        strategy=source.kind,
        world_size=1,
        files=(DataFile(data_file, (folder / data_file).stat().st_size),),
        tensors={
            name: TensorEntry(name, dtype_name(spec.dtype), tuple(spec.shape), tuple(chunks[name]))
            for name, spec in tensors.items()
        },
        scalars=source.scalars,
        **stamp(),
    )
