"""The source of a conversion: named tensors, of which any range can be read alone."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from ...errors import CheckpointError
from ...files import open_regular, read_at
from ..native.manifest import RunState
from ..native.reader import TensorSpec
from ..native.writer import byte_view

RESTORE = "restore it from a copy"
PIECE_BYTES = 8 * 2**20
"""Most bytes of a tensor that a conversion holds at once."""
_LONG_RUN = 2**18
"""Bytes from which on each run is read separately; shorter neighbouring runs are read together."""


@contextmanager
def reading(path: Path, fix: str = RESTORE) -> Iterator[None]:
    """Turn what a damaged or malformed file makes a reader raise into an error that names the file.

    Raises:
        CheckpointError: anything else was raised.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read: {reason}", "check its path, owner and mode") from error
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}", fix) from error


@dataclass
class Source:
    """An open checkpoint of any kind, with shardkit's names: `model.<fqn>`, `buffer.<fqn>`, `optim.<fqn>.<state>`.

    Attributes:
        kind: name of the format in messages and in the manifest of a converted checkpoint.
        read_into: (name, start, out) fills the 1-D CPU tensor `out`, of the tensor's dtype, from element `start` on.
        scalars: optimizer states that are one number, by name.
        step: number of optimizer steps; 0 if the source does not say.
        ties: further name of a tied weight (`head.weight`) → its name in `tensors`; both without `model.`.
        run: state of the run, if shardkit saved it; `None` for other sources.
        notes: one line on each part of the checkpoint that is left out.
        bytes_read: returns the bytes requested from files of other tools so far.
    """

    kind: str
    path: Path
    tensors: Mapping[str, TensorSpec]
    read_into: Callable[[str, int, torch.Tensor], None]
    close: Callable[[], None]
    scalars: dict[str, float] = field(default_factory=dict)
    step: int = 0
    ties: dict[str, str] = field(default_factory=dict)
    run: RunState | None = None
    notes: list[str] = field(default_factory=list)
    bytes_read: Callable[[], int] = lambda: 0

    def read(self, name: str, start: int = 0, length: int | None = None) -> torch.Tensor:
        """The elements [start, start + length) of the flattened tensor, 1-D; `None` = to its end."""
        spec = self.tensors[name]
        elements = torch.empty(math.prod(spec.shape) - start if length is None else length, dtype=spec.dtype)
        self.read_into(name, start, elements)
        return elements

    def pieces(self, name: str, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Yield the flattened tensor in order, in pieces of at most `PIECE_BYTES`, each a new 1-D tensor on the CPU.

        Raises:
            CheckpointError: a finite value overflows `dtype`.
        """
        return self.range_of(name, 0, math.prod(self.tensors[name].shape), dtype)

    def by_plain_name(self) -> dict[str, tuple[str, TensorSpec]]:
        """Each tensor with its name, by its name without the kind; tied ones by each name."""
        plain = {name.partition(".")[2]: (name, spec) for name, spec in self.tensors.items()}
        return plain | {alias: plain[name] for alias, name in self.ties.items() if name in plain}

    def range_of(self, name: str, start: int, length: int, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Yield the elements [start, start + length) of the flattened tensor, in pieces as `pieces` does."""
        spec = self.tensors[name]
        step = PIECE_BYTES // spec.dtype.itemsize
        for at in range(start, start + length, step):
            piece = self.read(name, at, min(step, start + length - at))
            yield piece if dtype is None or dtype == spec.dtype else cast(piece, dtype, name)


def cast(piece: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast a piece of the tensor `name` to another type.

    Raises:
        CheckpointError: a finite value overflows the type.
    """
    out = piece.to(dtype)
    if not torch.equal(torch.isfinite(out), torch.isfinite(piece)):
        largest = piece[torch.isfinite(piece)].abs().max().item()
        raise CheckpointError(
            f"{name} holds {largest:.3g}, more than {str(dtype).removeprefix('torch.')} can hold",
            "use --dtype bf16 or fp32",
        )
    return out


@dataclass(frozen=True)
class Extent:
    """Runs of consecutive elements of a flattened tensor, which a file stores one after another.

    Attributes:
        offset: byte of the file at which the first run begins.
        starts: index of each run's first element in the flattened tensor, ascending.
        run: number of elements in each run.
    """

    file: Path
    offset: int
    starts: tuple[int, ...] | npt.NDArray[np.int64]
    run: int

    @cached_property
    def run_starts(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.starts, dtype=np.int64)


@dataclass(frozen=True)
class FileTensor(TensorSpec):
    """A tensor whose elements lie in files, in one or several extents."""

    extents: tuple[Extent, ...] = ()


class FileTensors:
    """Reads ranges of tensors directly from the files that hold them, from any thread.

    Raises:
        CheckpointError: an element of a tensor is in no file, or in two; or tensors overlap and together have more than
            twice the bytes of the file that holds them.
    """

    def __init__(self, tensors: Mapping[str, FileTensor]) -> None:
        self.tensors = tensors
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._files: dict[Path, BinaryIO] = {}
        _refuse_overlaps(tensors)
        for name, tensor in tensors.items():
            _check_complete(name, tensor)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, CPU, contiguous, of the tensor's dtype) with elements from `start` on."""
        tensor, target = self.tensors[name], byte_view(out)
        size, stop = tensor.dtype.itemsize, start + out.numel()
        for extent in tensor.extents:
            if not extent.run:
                continue
            low = max(0, int(np.searchsorted(extent.run_starts, start, side="right")) - 1)
            high = int(np.searchsorted(extent.run_starts, stop, side="left"))
            if high - low == 1:
                self._read_run(name, extent, low, start, stop, size, target)
            elif extent.run * size >= _LONG_RUN:
                for index in range(low, high):
                    self._read_run(name, extent, index, start, stop, size, target)
            elif high > low:
                self._read_runs(name, extent, low, high, start, stop, size, target)

    def _read_run(
        self, name: str, extent: Extent, index: int, start: int, stop: int, size: int, target: memoryview
    ) -> None:
        """Read the elements of run `index` that lie in [start, stop) into `target`, which holds that range."""
        begin = int(extent.run_starts[index])
        overlap_start, overlap_end = max(start, begin), min(stop, begin + extent.run)
        if overlap_start < overlap_end:
            offset = extent.offset + (index * extent.run + overlap_start - begin) * size
            self._pread(
                name, extent.file, offset, target[(overlap_start - start) * size : (overlap_end - start) * size]
            )

    def _read_runs(
        self, name: str, extent: Extent, low: int, high: int, start: int, stop: int, size: int, target: memoryview
    ) -> None:
        """Read the runs [low, high) with one call, and copy the elements of each in [start, stop) to `target`."""
        stretch = memoryview(bytearray((high - low) * extent.run * size))
        self._pread(name, extent.file, extent.offset + low * extent.run * size, stretch)
        for index in range(low, high):
            begin = int(extent.run_starts[index])
            overlap_start, overlap_end = max(start, begin), min(stop, begin + extent.run)
            at = (index - low) * extent.run + overlap_start - begin
            if overlap_start < overlap_end:
                target[(overlap_start - start) * size : (overlap_end - start) * size] = stretch[
                    at * size : (at + overlap_end - overlap_start) * size
                ]

    def _pread(self, name: str, file: Path, offset: int, out: memoryview) -> None:
        """Fill `out` with the file's bytes from `offset` on.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        with reading(file):
            n_read = read_at(self._open(file), out, offset)
        if n_read < len(out):
            raise CheckpointError(f"{file} ends before {name} does", RESTORE)
        self.bytes_read += n_read

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = open_regular(file)
            return self._files[file].fileno()


def _refuse_overlaps(tensors: Mapping[str, FileTensor]) -> None:
    """Refuse tensors that share bytes so often that a small file would become a large one.

    Weights may be views of one array: tensors may have up to twice the bytes of their file.

    Raises:
        CheckpointError: they have more.
    """
    n_used: Counter[Path] = Counter()
    for tensor in tensors.values():
        for extent in tensor.extents:
            n_used[extent.file] += len(extent.starts) * extent.run * tensor.dtype.itemsize
    for file, n_bytes in n_used.items():
        size = file.stat().st_size
        if n_bytes > 2 * size:
            raise CheckpointError(
                f"{file} has {size:,} bytes, its tensors {n_bytes:,}: they use the same bytes more than once",
                "save each tensor as its own, tensor.clone(); if the file is not your own, do not trust it",
            )


def _check_complete(name: str, tensor: FileTensor) -> None:
    """Check that the extents of a tensor hold each element exactly once.

    Raises:
        CheckpointError: they do not; the message names the first element that is missing or repeated.
    """
    spans = [np.stack([e.run_starts, e.run_starts + e.run], axis=1) for e in tensor.extents if e.run]
    ordered = np.concatenate([np.empty((0, 2), np.int64), *spans])
    ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
    ends, starts = np.append(0, ordered[:, 1]), np.append(ordered[:, 0], math.prod(tensor.shape))
    wrong = np.flatnonzero(ends != starts)
    if len(wrong):
        file = tensor.extents[0].file if tensor.extents else "the source"
        at = min(ends[wrong[0]], starts[wrong[0]])
        raise CheckpointError(f"element {at} of {name} is missing from {file} and its neighbours", RESTORE)


def file_source(kind: str, path: Path, tensors: Mapping[str, FileTensor], **fields: object) -> Source:
    """A source whose tensors lie in files.

    Args:
        fields: further attributes of the source.
    """
    files = FileTensors(tensors)
    return Source(
        kind, path, tensors, files.read_into, files.close,
        bytes_read=lambda: files.bytes_read, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def canonical(names: Iterable[str]) -> dict[str, str]:
    """Map each name to the same name without the parts that DDP, FSDP1, torch.compile and checkpoint wrappers add."""
    all_names = list(names)
    wrapped = bool(all_names) and all(name.startswith("module.") for name in all_names)
    out = {}
    for name in all_names:
        plain = name.removeprefix("module.") if wrapped else name
        for wrapper in _WRAPPERS:
            plain = plain.replace(wrapper, "")
        out[name] = plain
    return out


def logical(fqn: str, dtype: torch.dtype) -> str:
    """shardkit's name of a tensor, `model.<fqn>` or `buffer.<fqn>`, from a source that does not tell them apart.

    Batch-norm statistics and tensors that are not floats are buffers.
    """
    is_buffer = not dtype.is_floating_point or fqn.rpartition(".")[2] in _BUFFERS
    return f"{'buffer' if is_buffer else 'model'}.{fqn}"
