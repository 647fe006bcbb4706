"""Write a checkpoint: one file of raw elements per rank, then the manifest, then one rename."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import CheckpointError, gib
from ...parallel.runs import Runs
from ...strategies.base import Shard
from .layout import TMP, fsync_folder, publish
from .manifest import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DTYPE_BYTES,
    FILE_NAME,
    Chunk,
    DataFile,
    Manifest,
    RunState,
    TensorEntry,
    dump,
    find_hole,
)  # fmt: skip

ALIGNMENT = 64
"""Chunks begin at multiples of so many bytes in their file, so that a memory map of a chunk is aligned for any type."""
_SPARE_BYTES = 64 * 2**20
"""Free space that a save leaves on the disk, for the manifest, the metrics and the file system itself."""
T = TypeVar("T")


def data_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.bin"


@dataclass(frozen=True)
class SavePlan:
    """The part of a save that one rank does."""

    tensors: dict[str, tuple[tuple[int, ...], str]]  # shape and dtype of each tensor of which the rank holds a part
    chunks: list[tuple[str, Runs]]  # tensor and elements of each chunk that it writes, in the order of its file
    n_bytes: int  # of all its chunks


def plan_save(shards: Sequence[Shard], chunk_bytes: int = CHUNK_BYTES) -> tuple[SavePlan, list[torch.Tensor]]:
    """Cut the elements that this rank writes into chunks. Of ranks with the same ones, replica 0 writes them. Returns
    the plan, and the elements of each chunk."""
    chunks, contents = [], []
    for shard in (shard for shard in shards if shard.replica == 0):
        step = max(1, chunk_bytes // shard.local.element_size())
        if 0 < shard.run <= step:  # a chunk has whole runs; longer ones are chunks of their own
            step -= step % shard.run
            parts = [(shard.start, shard.local)]
        else:
            parts = [*shard.ranges()]
        for start, part in parts:
            in_runs = part.numel() > shard.run > 0
            for at in range(0, part.numel(), step):
                content = part[at : at + step]
                begin = start + (at // shard.run * shard.stride if in_runs else at)
                has_several = in_runs and content.numel() > shard.run
                numbers = (shard.run, shard.stride) if has_several else (0, 0)
                chunks.append((shard.name, Runs(begin, content.numel(), *numbers)))
                contents.append(content)
    tensors = {shard.name: (tuple(shard.shape), dtype_name(shard.local.dtype)) for shard in shards}
    return SavePlan(tensors, chunks, sum(content.nbytes for content in contents)), contents


def check_plans(plans: Iterable[SavePlan]) -> None:
    """Check that the ranks' plans cover every element."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    parts: dict[str, list[Runs]] = {}
    for plan in plans:
        for name, (shape, dtype) in plan.tensors.items():
            first_shape, first_dtype = tensors.setdefault(name, (shape, dtype))
            if shape != first_shape:
                raise CheckpointError(f"ranks disagree about the shape of {name}: {first_shape} and {shape}")
            if dtype != first_dtype:
                raise CheckpointError(f"ranks disagree about the dtype of {name}")
        for name, runs in plan.chunks:
            parts.setdefault(name, []).append(runs)
    for name, (shape, _) in tensors.items():
        hole = find_hole(math.prod(shape), parts.get(name, []))
        if hole is not None:
            raise CheckpointError(f"element {hole} of {name} is held by no rank, or by two")


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"tensors of {dtype} cannot be saved", f"use one of {', '.join(DTYPE_BYTES)}")
    return name


class RankFailure(Exception):
    """An exception of the lowest rank that failed, raised on every rank."""

    def __init__(self, rank: int, error: Exception) -> None:
        super().__init__(f"rank {rank}: {error}")
        self.rank, self.error = rank, error


def collect(group: dist.ProcessGroup, local: Callable[[], T], main: Callable[[list[T]], None]) -> None:
    """Call `local` on every rank, then on rank 0 `main` with all that returned; collective. If one of these calls
    raises, every rank gets a RankFailure."""
    problem: Exception | None = None
    returned: T | None = None
    try:
        returned = local()
    except Exception as error:
        problem = error
    is_main, everyone = dist.get_rank(group) == 0, list[Any]()
    if is_main:
        everyone = [None] * dist.get_world_size(group)
    dist.gather_object((returned, problem), everyone if is_main else None, dst=0, group=group)
    failures = [(rank, error) for rank, (_, error) in enumerate(everyone) if error is not None]
    if is_main and not failures:
        try:
            main([value for value, _ in everyone])
        except Exception as error:
            problem = error
            failures = [(0, error)]
    box: list[Any] = [failures[0] if failures else None]
    dist.broadcast_object_list(box, src=0, group=group)
    if box[0] is not None:
        raise RankFailure(*box[0]) from problem


class RangeWriter:
    """The storage of one save: a folder `<final>.tmp`, which becomes `<final>` when rank 0 has written the manifest."""

    def __init__(
        self,
        final: Path,
        rank: int,
        run: RunState,
        strategy: str,
        world_size: int,
        scalars: dict[str, float],
        fence: Callable[[], None] | None = None,
    ) -> None:
        self.final = final
        self._fence = fence or (lambda: None)
        self.draft = final.with_suffix(TMP)
        self._rank = rank
        self.phase = "waiting for all ranks' plans"
        """The phase of the save in which this rank is; begins with `waiting` while the rank needs other ranks."""
        self._about: dict[str, Any] = dict(run=run, strategy=strategy, world_size=world_size, scalars=scalars)
        self._plans: list[SavePlan] = []

    def write(self, shards: Sequence[Shard], chunk_bytes: int, group: dist.ProcessGroup) -> None:
        """Write the shards of all ranks; collective. A full disk is the RankFailure of an OSError."""
        contents: list[torch.Tensor] = []

        def plan() -> SavePlan:
            nonlocal contents
            planned, contents = plan_save(shards, chunk_bytes)
            return planned

        def write_chunks() -> list[tuple[int, tuple[int, ...]]]:
            placed = []
            if contents:
                self.phase = f"writing {self.draft.name}/{data_file_name(self._rank)}"
                placed = write_file(self.draft / data_file_name(self._rank), contents)
            self.phase = "waiting for the other ranks' files"
            return placed

        collect(group, plan, self._prepare)
        collect(group, write_chunks, self._finish)

    def _prepare(self, plans: list[SavePlan]) -> None:
        """Check the plans and the free space, and make an empty folder to write to."""
        check_plans(plans)
        self._plans = plans
        self.phase = f"making {self.draft.name}"
        self._fence()
        self.final.parent.mkdir(parents=True, exist_ok=True)
        check_space(self.final.parent, sum(plan.n_bytes for plan in plans))
        if self.draft.exists():
            shutil.rmtree(self.draft)
        self.draft.mkdir()
        self.phase = "waiting for all ranks' plans"

    def _finish(self, placed: list[list[tuple[int, tuple[int, ...]]]]) -> None:
        """Write the manifest and rename the folder, once every rank's file is on disk."""
        self.phase = f"writing {self.draft.name}/{FILE_NAME}"
        manifest = self._manifest(placed)
        with (self.draft / FILE_NAME).open("xb") as file:
            file.write(dump(manifest))
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(self.draft)
        self.phase = f"publishing {self.final.name}"
        self._fence()
        publish(self.draft, self.final)

    def _manifest(self, placed: list[list[tuple[int, tuple[int, ...]]]]) -> Manifest:
        files: list[DataFile] = []
        chunks: dict[str, list[Chunk]] = {}
        for rank, (plan, of_rank) in enumerate(zip(self._plans, placed, strict=True)):
            for (name, runs), (offset, crcs) in zip(plan.chunks, of_rank, strict=True):
                chunk = Chunk(runs.start, runs.length, len(files), offset, crcs, runs.run, runs.stride)
                chunks.setdefault(name, []).append(chunk)
            if of_rank:
                file_name = data_file_name(rank)
                files.append(DataFile(file_name, (self.draft / file_name).stat().st_size))
        described = {name: about for plan in self._plans for name, about in plan.tensors.items()}
        tensors = {
            name: TensorEntry(name, dtype, shape, tuple(sorted(chunks.get(name, []), key=lambda chunk: chunk.start)))
            for name, (shape, dtype) in described.items()
        }
        return Manifest(files=tuple(files), tensors=tensors, **stamp(), **self._about)


def check_space(folder: Path, needed: int) -> None:
    """Raise `OSError` (ENOSPC) unless `folder`'s file system has room for `needed` bytes and some to spare."""
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < needed + _SPARE_BYTES:
        needs = f"{gib(needed)} to write and {gib(_SPARE_BYTES)} to keep free"
        raise OSError(errno.ENOSPC, f"{needs}, {gib(free)} free in {folder}")


def write_file(path: Path, tensors: Iterable[torch.Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Write tensors one after another to a new file and sync it to disk.

    A thread computes checksums while the same bytes are written: both release the GIL. The kernel is told to write to
    disk at once, so that the fsync at the end has little to do; bytes on disk leave the page cache. Returns (offset in
    the file, CRC-32 of each block) for each tensor.
    """
    placed: list[tuple[int, Future[tuple[int, ...]]]] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with ThreadPoolExecutor(1) as pool:
            at = begun = 0
            for tensor in tensors:
                at += _write(descriptor, bytes(-at % ALIGNMENT))
                view = byte_view(tensor.detach().to("cpu").contiguous())
                crcs = pool.submit(block_crcs, view)
                placed.append((at, crcs))
                at += _write(descriptor, view)
                if at - begun >= CHUNK_BYTES:
                    os.posix_fadvise(descriptor, begun, at - begun, os.POSIX_FADV_DONTNEED)
                    begun = at
                crcs.result()  # at most one chunk waits in memory for its checksum
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return [(at, crcs.result()) for at, crcs in placed]


def _write(descriptor: int, view: bytes | memoryview) -> int:
    total, n_written = len(view), 0
    while n_written < total:
        n_written += os.write(descriptor, view[n_written:])
    return total


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a writable view."""
    view: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(view)


def block_crcs(view: memoryview) -> tuple[int, ...]:
    """The CRC-32 of each block of the bytes; the last block may be short."""
    return tuple(zlib.crc32(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES))


def stamp() -> dict[str, Any]:
    """When a manifest was made, and by which versions."""
    try:
        version = metadata.version("shardkit")
    except metadata.PackageNotFoundError:
        version = "not installed"
    versions = {"shardkit": version, "torch": torch.__version__}
    return {"created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions}
