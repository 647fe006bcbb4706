"""Read any range of any tensor of a checkpoint, checked block by block, without a process group."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...files import read_at
from ...parallel.runs import Runs
from ...strategies.base import Shard
from .layout import check_files, read_manifest
from .manifest import Chunk, CorruptCheckpoint, Manifest, TensorEntry
from .writer import byte_view

_PIECE_BYTES = 8 * 2**20
"""Bytes that are read at once, and then checked while they are in the processor's cache and the kernel reads ahead."""


@dataclass(frozen=True)
class TensorSpec:
    """The full shape and the dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointReader:
    """Random access to a checkpoint's tensors, from any thread.

        with CheckpointReader("runs/a/checkpoints/step_00000100") as checkpoint:
            for name, spec in checkpoint.tensors().items():
                rows = checkpoint.read(name, 0, 1024)  # 1-D, elements [0, 1024) of the flattened tensor

    Every returned byte was checked against its checksum, else CorruptCheckpoint names the file; a read touches at most
    one extra block (1 MiB) at each end.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        check_files(self.path, self.manifest)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the data files; may be called twice."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by name: `model.<fqn>`, `optim.<fqn>.<state>`, `buffer.<fqn>`, `rng.<rank>.<generator>`."""
        return {n: TensorSpec(t.shape, getattr(torch, t.dtype)) for n, t in self.manifest.tensors.items()}

    def read(self, name: str, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements [start, start + length) of the flattened tensor, 1-D on CPU; `None` = to its end."""
        entry = self._entry(name)
        count = entry.numel - start if length is None else length
        out = torch.empty(max(count, 0), dtype=getattr(torch, entry.dtype))
        self.read_into(name, start, out)
        return out

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, CPU, contiguous, of the saved dtype) with elements from `start` on."""
        entry = self._entry(name)
        stop = start + out.numel()
        if start < 0 or stop > entry.numel or out.dtype != getattr(torch, entry.dtype):
            raise ValueError(f"[{start}, {stop}) as {out.dtype} of {name}: {entry.numel} elements of {entry.dtype}")
        for chunk in entry.chunks:
            if chunk.start >= stop:
                break
            low, high = chunk.runs.below(start), chunk.runs.below(stop)
            if low < high and not chunk.run:
                part = out[chunk.start + low - start :][: high - low]
                self._read_bytes(entry, chunk, low * entry.itemsize, byte_view(part))
            elif low < high:
                content = torch.empty(high - low, dtype=out.dtype)
                self._read_bytes(entry, chunk, low * entry.itemsize, byte_view(content))
                for block in chunk.runs.blocks(low, high):
                    rows = content[block.offset - low :][: block.rows * block.width].view(block.rows, block.width)
                    strided_rows(out, block.start - start, rows.shape, chunk.stride).copy_(rows)

    def fill(self, shards: Iterable[Shard]) -> None:
        """Fill ranges, on any device. The manifest has their tensors; see `resume.matching_entry`."""
        parts, cut_otherwise = [], []
        for shard in shards:
            entry = self._entry(shard.name)
            of_shard = [*_parts(entry, shard)]
            if sum(part.numel() for _, _, part in of_shard) == shard.local.numel():
                parts += [(entry, *part) for part in of_shard]
            else:
                cut_otherwise.append(shard)
        # One part after the other, in file order: several readers of one file defeat the kernel's read-ahead.
        for entry, chunk, first, target in sorted(parts, key=lambda part: (part[1].file, part[1].offset)):
            on_host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
            self._read_bytes(entry, chunk, first * entry.itemsize, byte_view(on_host))
            if on_host is not target:
                target.copy_(on_host)
        for shard in cut_otherwise:
            on_host = torch.empty_like(shard.local, device="cpu")
            read_runs(self.read_into, shard.name, shard.runs, 0, on_host)
            shard.local.detach().copy_(on_host)

    def _read_bytes(self, entry: TensorEntry, chunk: Chunk, low: int, out: memoryview) -> None:
        """Read the bytes [low, low + len(out)) of a chunk. Whole blocks go directly to `out`, parts are copied."""
        block, total, high = self.manifest.block_bytes, chunk.length * entry.itemsize, low + len(out)
        at = low
        while at < high:
            block_start = at // block * block
            whole_until = total if high == total else high // block * block
            if at == block_start and whole_until > at:
                self._pread_checked(entry, chunk, at, out[at - low : whole_until - low])
                at = whole_until
                continue
            scratch = memoryview(bytearray(min(block, total - block_start)))
            self._pread_checked(entry, chunk, block_start, scratch)
            end = min(block_start + len(scratch), high)
            out[at - low : end - low] = scratch[at - block_start : end - block_start]
            at = end

    def _pread_checked(self, entry: TensorEntry, chunk: Chunk, at: int, out: memoryview) -> None:
        """Read and check bytes that begin at a block's start and end at a block's or the chunk's end."""
        block, path = self.manifest.block_bytes, self.path / self.manifest.files[chunk.file].name
        step = max(_PIECE_BYTES // block, 1) * block
        for begin in range(0, len(out), step):
            piece = out[begin : begin + step]
            try:
                n_read = read_at(self._open(chunk.file), piece, chunk.offset + at + begin)
            except OSError as error:
                raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
            if n_read < len(piece):
                raise CorruptCheckpoint(f"{path} ends before {entry.name} does")
            for low in range(0, len(piece), block):
                if zlib.crc32(piece[low : low + block]) != chunk.crcs[(at + begin + low) // block]:
                    raise CorruptCheckpoint(
                        f"{path} does not match its checksum at byte {chunk.offset + at + begin + low}, in {entry.name}"
                    )

    def _open(self, index: int) -> int:
        with self._lock:
            if index not in self._descriptors:
                path = self.path / self.manifest.files[index].name
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                except OSError as error:
                    raise CorruptCheckpoint(f"{path} cannot be opened: {error.strerror}") from error
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads further ahead
                self._descriptors[index] = descriptor
            return self._descriptors[index]

    def _entry(self, name: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}", "see CheckpointReader.tensors() for the names")
        return entry

    def problems(self) -> Iterator[str]:
        """Read everything and yield one line per damaged chunk."""
        for entry in self.manifest.tensors.values():
            for chunk in entry.chunks:
                try:
                    self._read_bytes(entry, chunk, 0, memoryview(bytearray(chunk.length * entry.itemsize)))
                except CorruptCheckpoint as error:
                    yield error.cause


def _parts(entry: TensorEntry, shard: Shard) -> Iterator[tuple[Chunk, int, torch.Tensor]]:
    """Yield each chunk that holds elements of a shard in the same runs as the shard, the first of them in it, and the
    part of the shard that they fill."""
    for chunk in entry.chunks:
        rows, out_of_phase = divmod(chunk.start - shard.start, max(shard.stride, 1))
        if (chunk.run, chunk.stride) == (shard.run, shard.stride) and not out_of_phase:
            ahead = rows * max(shard.run, 1)
            low, high = max(ahead, 0), min(ahead + chunk.length, shard.local.numel())
            if low < high:
                yield chunk, low - ahead, shard.local.detach()[low:high]


def read_runs(
    read_into: Callable[[str, int, torch.Tensor], None], name: str, runs: Runs, low: int, out: torch.Tensor
) -> None:
    """Fill `out` with elements of several runs, from their element `low` on, by reads of ranges.

    Runs that lie near each other are read together with the elements between them: a read of each would check its
    whole block.
    """
    for block in runs.blocks(low, low + out.numel()):
        rows = out[block.offset - low :][: block.rows * block.width].view(block.rows, block.width)
        at_once = max(1, _PIECE_BYTES // max(runs.stride * out.element_size(), 1))
        for row in range(0, block.rows, at_once):
            piece, start = rows[row : row + at_once], block.start + row * runs.stride
            if len(piece) == 1:
                read_into(name, start, piece[0])
            else:
                span = torch.empty((len(piece) - 1) * runs.stride + block.width, dtype=out.dtype)
                read_into(name, start, span)
                piece.copy_(strided_rows(span, 0, piece.shape, runs.stride))


def strided_rows(flat: torch.Tensor, start: int, shape: Sequence[int], stride: int) -> torch.Tensor:
    """Ranges of a flat tensor that begin `stride` apart, as the rows of a view."""
    return flat[start:].as_strided(shape, (stride, 1))
