"""Write a checkpoint: one file of raw elements per rank, then the manifest, then one rename."""

from __future__ import annotations

import errno
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ...errors import gib
from .layout import TMP, fsync_folder, publish
from .manifest import BLOCK_BYTES, CHUNK_BYTES, FILE_NAME, Chunk, DataFile, Manifest, RunState, TensorEntry, dump
from .planner import dtype_name

ALIGNMENT = 64
"""Chunks begin at multiples of so many bytes in their file, so that a memory map of a chunk is aligned for any type."""
_SPARE_BYTES = 64 * 2**20
"""Free space that a save leaves on the disk, for the manifest, the metrics and the file system itself."""


def data_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.bin"


class RangeWriter(StorageWriter):
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

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: each save has a writer of its own, so there is no state of an earlier save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the free space and make an empty folder to write to; the coordinator alone calls this.

        Raises:
            OSError: there is no space for the checkpoint beside the existing ones, or the folder cannot be made.
        """
        self.phase = f"making {self.draft.name}"
        self._fence()
        needed = sum(_item_bytes(item) for plan in plans for item in plan.items)
        self.final.parent.mkdir(parents=True, exist_ok=True)
        check_space(self.final.parent, needed)
        if self.draft.exists():
            shutil.rmtree(self.draft)
        self.draft.mkdir()
        self.phase = "waiting for all ranks' plans"
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            self.phase = f"writing {self.draft.name}/{data_file_name(self._rank)}"
            tensors = (planner.resolve_data(item) for item in plan.items)
            placed = write_file(self.draft / data_file_name(self._rank), tensors)  # type: ignore[arg-type]
            results = [
                WriteResult(item.index, _item_bytes(item), (self._rank, offset, crcs))
                for item, (offset, crcs) in zip(plan.items, placed, strict=True)
            ]
        self.phase = "waiting for the other ranks' files"
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename the folder; the coordinator calls this when every rank's file is on disk."""
        self.phase = f"writing {self.draft.name}/{FILE_NAME}"
        manifest = self._manifest(metadata, results)
        with (self.draft / FILE_NAME).open("xb") as file:
            file.write(dump(manifest))
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(self.draft)
        self.phase = f"publishing {self.final.name}"
        self._fence()
        publish(self.draft, self.final)

    def _manifest(self, metadata: Metadata, results: list[list[WriteResult]]) -> Manifest:
        ranks = sorted({r.storage_data[0] for rank_results in results for r in rank_results})
        names = [data_file_name(rank) for rank in ranks]
        files = tuple(DataFile(name, (self.draft / name).stat().st_size) for name in names)
        index_of = {rank: index for index, rank in enumerate(ranks)}
        placed = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors: dict[str, TensorEntry] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for chunk in entry.chunks:
                rank, offset, crcs = placed[MetadataIndex(name, chunk.offsets)]
                chunks.append(Chunk(chunk.offsets[0], chunk.sizes[0], index_of[rank], offset, crcs))
            shape = tuple(metadata.planner_data[name])
            tensors[name] = TensorEntry(name, dtype_name(entry.properties.dtype), shape, tuple(chunks))
        return Manifest(
            created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            versions={"shardkit": _version(), "torch": torch.__version__},
            files=files,
            tensors=tensors,
            **self._about,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # made for one save, never looked up by a path


def _item_bytes(item: Any) -> int:
    data = item.tensor_data
    return int(data.chunk.sizes[0] * data.properties.dtype.itemsize)


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
    disk at once, so that the fsync at the end has little to do; bytes on disk leave the page cache.

    Returns:
        (offset in the file, CRC-32 of each block), for each tensor.
    """
    placed: list[tuple[int, ThreadFuture[tuple[int, ...]]]] = []
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


def block_crcs(view: memoryview, block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
    """The CRC-32 of each block of the bytes; the last block may be short."""
    return tuple(zlib.crc32(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes))


def _version() -> str:
    try:
        return packages.version("shardkit")
    except packages.PackageNotFoundError:
        return "not installed"
