"""The manifest of a checkpoint: which bytes of which file hold which elements of which tensor. JSON, without torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ...errors import CheckpointError
from ...parallel.runs import Runs

SCHEMA = 2
READABLE = (1, 2)
"""Schemas that this version loads: the current one and the one before it, which had no chunks of several runs."""

FILE_NAME = "manifest.json"
CHUNK_BYTES = 64 * 2**20
BLOCK_BYTES = 2**20
"""Bytes under one checksum: reading a part of a chunk reads at most this many extra bytes at each end."""
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex128": 16, "complex64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_FILE = re.compile(r"rank_\d{5,}\.bin")


class CorruptCheckpoint(CheckpointError):
    """A checkpoint whose bytes differ from the saved ones: torn, truncated, flipped, or not a checkpoint at all."""


@dataclass(frozen=True)
class Chunk:
    """Elements of a flattened tensor, as they lie in a file: `length` from `start` on, or in several runs."""

    start: int
    length: int
    file: int  # index of the file in the manifest
    offset: int  # byte of the file at which they begin
    crcs: tuple[int, ...]  # CRC-32 of each block of their bytes
    run: int = 0  # elements of each run; 0 = one range
    stride: int = 0  # distance of the first elements of two runs

    @property
    def runs(self) -> Runs:
        return Runs(self.start, self.length, self.run, self.stride)


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor; its chunks are ordered by their first elements and hold each element exactly once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class DataFile:
    """A file of raw little-endian elements and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class RunState:
    """The state of a run after a step, without its tensors."""

    step: int  # number of optimizer steps; the learning rate is a function of it
    tokens_total: int = 0  # number of target tokens that the run has trained on
    seed: int = 0  # seed of the data order (train.seed)
    epoch: int = 0  # epoch of the next sample
    next_sample: int = 0  # the next sample's position in the epoch's order, over all ranks
    # size of the training split, to notice that it changed; `None` if the caller feeds the data
    n_samples: int | None = None
    val_loss: float | None = None  # validation loss at this step; `None` without an evaluation
    extra: dict[str, Any] = field(default_factory=dict)  # any JSON values that the caller stores with the state


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its elements."""

    run: RunState
    strategy: str
    world_size: int
    created: str  # local time, ISO 8601
    versions: dict[str, str]
    files: tuple[DataFile, ...]
    tensors: dict[str, TensorEntry]
    scalars: dict[str, float]  # optimizer states and engine states that are one number, by name
    block_bytes: int = BLOCK_BYTES

    @property
    def n_bytes(self) -> int:
        return sum(file.size for file in self.files)


def storable(run: RunState, scalars: Mapping[str, float]) -> RunState:
    """The run's state in a form that JSON can hold: a validation loss that is not finite becomes `None`."""
    if run.val_loss is not None and not math.isfinite(run.val_loss):
        run = replace(run, val_loss=None)
    for name, value in scalars.items():
        if not math.isfinite(value):
            raise CheckpointError(
                f"{name} is {value} after step {run.step}, and a checkpoint holds finite numbers",
                "look at the losses and gradient norms of the last steps; an optimizer's counters are finite after "
                "finite gradients",
            )
    try:
        json.dumps(asdict(run), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of step {run.step} cannot be written as JSON: {error}",
            "keep finite numbers, text, lists and dicts in RunState.extra",
        ) from error
    return run


def dump(manifest: Manifest) -> bytes:
    """The content of a manifest file: a JSON object of the manifest and the BLAKE2 digest of its canonical text."""
    body = {
        "schema": SCHEMA,
        "run": asdict(manifest.run),
        "strategy": manifest.strategy,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "versions": manifest.versions,
        "block_bytes": manifest.block_bytes,
        "byte_order": "little",
        "files": [[file.name, file.size] for file in manifest.files],
        "scalars": manifest.scalars,
        "tensors": {
            t.name: {
                "dtype": t.dtype,
                "shape": list(t.shape),
                "chunks": [
                    [c.start, c.length, c.file, c.offset, *((c.run, c.stride) if c.run else ()), list(c.crcs)]
                    for c in t.chunks
                ],
            }
            for t in manifest.tensors.values()
        },
    }
    text = _canonical(body)
    return f'{{"digest":"{_digest(text)}","manifest":{text}}}\n'.encode()


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def parse(content: bytes, file: str) -> Manifest:
    """Parse the content of a manifest file; `file` is its path. Every number is checked, and nothing is executed."""
    try:
        document = json.loads(content)
        body = document["manifest"]
        if _digest(_canonical(body)) != document["digest"]:
            raise CorruptCheckpoint(f"{file} does not match its own digest")
        schema = body["schema"]
        if schema not in READABLE:
            writer = body["versions"].get("shardkit", "(version unknown)")
            raise CheckpointError(
                f"{file} has schema {schema!r}, this version reads {', '.join(map(str, READABLE))}",
                f"use shardkit {writer}, which wrote it, or a later version",
            )
        return _manifest(body)
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, AttributeError) as error:
        raise CorruptCheckpoint(f"{file} is not a manifest: {type(error).__name__}: {error}") from error


def _manifest(body: Mapping[str, Any]) -> Manifest:
    if body["byte_order"] != "little":
        raise ValueError(f"byte_order {body['byte_order']!r}")
    files = tuple(DataFile(name, *whole_numbers([size])) for name, size in body["files"])
    if wrong := [file.name for file in files if not _FILE.fullmatch(file.name)]:
        raise ValueError(f"file name {wrong[0]!r}")
    field_names = {f.name for f in fields(RunState)}
    run = RunState(**{key: value for key, value in body["run"].items() if key in field_names})
    samples = [] if run.n_samples is None else [run.n_samples]
    whole_numbers([run.step, run.tokens_total, run.seed, run.epoch, run.next_sample, *samples])
    block_bytes, world_size = whole_numbers([body["block_bytes"], body["world_size"]])
    if block_bytes < 64 or world_size < 1 or not isinstance(run.extra, dict):
        raise ValueError(f"blocks of {block_bytes} bytes, {world_size} ranks, or an extra that is not an object")
    numbers = [*body["scalars"].values(), *([] if run.val_loss is None else [run.val_loss])]
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ValueError("a state or a loss that is not a finite number")
    tensors = {name: _tensor(name, entry, files, block_bytes) for name, entry in body["tensors"].items()}
    n_bytes, most = sum(tensor.numel * tensor.itemsize for tensor in tensors.values()), sum(file.size for file in files)
    if n_bytes > most:
        raise ValueError(f"its tensors have {n_bytes} bytes, its files {most}: some bytes are used more than once")
    return Manifest(
        run=run,
        strategy=str(body["strategy"]),
        world_size=world_size,
        created=str(body["created"]),
        versions={str(k): str(v) for k, v in body["versions"].items()},
        files=files,
        tensors=tensors,
        scalars=body["scalars"],
        block_bytes=block_bytes,
    )


def _tensor(name: str, entry: Mapping[str, Any], files: tuple[DataFile, ...], block_bytes: int) -> TensorEntry:
    if entry["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"{name}: dtype {entry['dtype']!r}")
    chunks = tuple(
        Chunk(start, length, file, offset, tuple(crcs), *whole_numbers(runs))
        for start, length, file, offset, *runs, crcs in ((*whole_numbers(c[:4]), *c[4:]) for c in entry["chunks"])
    )
    tensor = TensorEntry(name, entry["dtype"], whole_numbers(entry["shape"]), chunks)
    for chunk in chunks:
        size = chunk.length * tensor.itemsize
        if chunk.offset + size > files[chunk.file].size:
            raise ValueError(f"{name}: a chunk ends after {files[chunk.file].name} does")
        if len(chunk.crcs) != -(-size // block_bytes):
            raise ValueError(f"{name}: {len(chunk.crcs)} checksums for {size} bytes")
        if (chunk.run or chunk.stride) and (not 0 < chunk.run < chunk.stride or chunk.length % chunk.run):
            raise ValueError(f"{name}: runs of {chunk.run} elements at distances of {chunk.stride}")
    hole = find_hole(tensor.numel, [chunk.runs for chunk in chunks])
    if hole is not None:
        raise ValueError(f"{name}: its chunks do not hold element {hole} exactly once")
    return tensor


def whole_numbers(values: Iterable[object]) -> tuple[int, ...]:
    """Check that a file's shape, strides, offsets or counts are integers ≥ 0, and return them; a ValueError if not."""
    numbers = tuple(values)
    if len(numbers) > 64:  # more than a tensor's dimensions: their product would take minutes
        raise ValueError(f"{len(numbers)} dimensions")
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError("a size, an offset or a count that is not a whole number below 2**62")
    return numbers  # type: ignore[return-value]


def find_hole(numel: int, parts: Sequence[Runs]) -> int | None:
    """The index of one of `numel` elements that the parts do not hold exactly once; None if they hold all.

    No run is looked at by itself. Where parts have several runs, all have the same distance, the width of a row: their
    columns have to fill a row, and in each column their rows the tensor.
    """
    widths = {part.stride for part in parts if part.run}
    if not widths:
        return _gap(numel, [(part.start, part.length) for part in parts])
    width = min(widths)
    columns: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts:
        row, column = divmod(part.start, width)
        run = part.run or part.length
        if max(widths) != width or numel % width or not 0 < run <= width - column:
            return part.start
        columns.setdefault((column, run), []).append((row, part.length // run))
    gap = _gap(width, list(columns))
    if gap is not None:
        return gap
    gaps = ((column, _gap(numel // width, rows)) for (column, _), rows in columns.items())
    return next((row * width + column for column, row in gaps if row is not None), None)


def _gap(numel: int, ranges: list[tuple[int, int]]) -> int | None:
    """The first index below `numel` that is not in exactly one of the (start, length) ranges."""
    expected = 0
    for start, length in sorted(ranges):
        if start != expected or length < 1:
            return min(start, expected)
        expected += length
    return None if expected == numel else min(expected, numel)
