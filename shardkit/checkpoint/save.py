"""Save and resume a run, on all ranks; a failing disk ends a save, not the run."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..config.schema import CheckpointConfig
from ..errors import CheckpointError, SaveError, SupersededError
from ..memory.probe import page_locked
from ..parallel.world import World
from ..strategies import Strategy
from ..strategies.base import Shard
from . import rng
from .native import layout
from .native.manifest import CHUNK_BYTES, RunState, storable
from .native.writer import RangeWriter, RankFailure, data_file_name

COST, LEAST_S = 0.02, 600.0
"""Automatic saves take at most this share of the time, and at least so many seconds pass from one to the next."""
_LOG = logging.getLogger(__name__)


_FIRST_STANDSTILL_S = 1800.0
"""A run's first save may stand still for this long."""
_LEAST_STANDSTILL_S = 120.0
_STANDSTILL_TIMES = 10
"""Later saves may stand still for ten times the longest save so far, or for two minutes if that is longer."""


def standstill_s(configured_s: float | None, measured_s: Sequence[float]) -> float:
    """Seconds in which a save may write no byte before it counts as stuck.

    `configured_s`: `checkpoint.timeout_s`; replaces the measured limit. `measured_s`: durations of the run's saves so
    far.
    """
    if configured_s is not None:
        return configured_s
    return max(_LEAST_STANDSTILL_S, _STANDSTILL_TIMES * max(measured_s)) if measured_s else _FIRST_STANDSTILL_S


def seen_on_disk(root: Path, rank: int, file_name: str) -> str:
    """How far a rank has come in the unfinished save below `root`, judged by its file alone."""
    drafts = sorted(root.glob(f"step_*{layout.TMP}"))
    if not drafts:
        return "before the save's first file"
    path = drafts[-1] / file_name
    try:
        size = path.stat().st_size
    except OSError:
        return f"before it wrote {drafts[-1].name}/{file_name}"
    return f"in or after {drafts[-1].name}/{file_name}, which has {size} bytes"


class Staging:
    """Host buffers that the first save allocates and later saves reuse; page-locked if the rank has a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._buffers: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}

    @property
    def n_bytes(self) -> int:
        """Host memory that the buffers take on this rank."""
        sizes = [buffer.nbytes for buffer in self._buffers.values()]
        return sum(map(page_locked, sizes) if self._pin else sizes)

    def copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copy the ranges that this rank writes to the host, as their `local`; all is copied when this returns."""
        staged = []
        for shard in shards:
            if shard.replica == 0:  # others are not written here, but their shapes are checked
                key = (shard.name, shard.start, shard.local.numel(), shard.local.dtype)
                if key not in self._buffers:
                    self._buffers[key] = torch.empty(key[2], dtype=key[3], pin_memory=self._pin)
                target = self._buffers[key]
                target.copy_(shard.local, non_blocking=self._pin)
                shard = replace(shard, local=target)
            staged.append(shard)
        if self._pin:
            torch.cuda.synchronize()
        return staged


@dataclass(frozen=True)
class SaveReport:
    """The outcome of a save. Times and `staging_bytes` are this rank's; the other fields are the same on every rank."""

    step: int
    path: Path
    blocking_s: float  # seconds for which training stood still
    total_s: float  # seconds from the start of the save until it was on disk under its final name
    staging_bytes: int  # host memory of this rank's copy if the save is asynchronous, otherwise 0
    error: str | None  # why the save failed; `None` if it succeeded


class Checkpointer:
    """Saves a strategy's state below `root`. All ranks construct it together, and call `save` together."""

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        config: CheckpointConfig,
        root: str | Path,  # the folder of the checkpoints, on a file system that all ranks share
        *,
        timeout_s: float = 1800,  # longest wait for the slowest rank's write
        meeting_s: float = 30,  # longest wait until all ranks begin a save; the error names the missing ranks
        chunk_bytes: int = CHUNK_BYTES,
        # Called on every rank when a save has ended, on the thread that calls `save` or `wait`.
        on_done: Callable[[SaveReport], None] | None = None,
        # Called on rank 0 before a save writes and before it publishes; raises if this run may no longer write there.
        fence: Callable[[], None] | None = None,
        left_out: Collection[str] = (),  # tensors neither saved nor loaded (the frozen model under an adapter)
    ) -> None:
        self._left_out = left_out
        self._strategy, self._world, self._config = strategy, world, config
        self.root = Path(root)
        self._meeting_s = meeting_s
        self._chunk_bytes = chunk_bytes
        self._on_done, self._fence = on_done, fence
        # A group of its own: a save in a thread must not interleave with the step's collectives.
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._staging = Staging(world.device)
        self._thread: threading.Thread | None = None
        self._ended: SaveReport | BaseException | None = None
        self._writer: RangeWriter | None = None
        self._measured_s: list[float] = []
        self._last_save = time.monotonic()
        self._run_ends = False
        self.last_step: int | None = None
        self.last_report: SaveReport | None = None
        self.failures = 0
        if world.is_main:
            try:
                layout.sweep(self.root)
            except OSError as error:  # the first save fails likewise, and tells all ranks
                _LOG.warning("%s cannot be tidied up: %s", self.root, error)

    @property
    def staging_bytes(self) -> int:
        """Host memory that async saves keep on this rank between saves."""
        return self._staging.n_bytes

    def written_bytes(self) -> int:
        """Bytes of unfinished saves so far, by all ranks."""
        drafts = self.root.glob(f"*{layout.TMP}/*")
        try:
            return sum(file.stat().st_size for file in drafts)
        except OSError:  # the draft was just renamed
            return 0

    def standstill_s(self) -> float:
        """Seconds in which a save may write no byte: `checkpoint.timeout_s`, or a limit from the run's saves so far."""
        return standstill_s(self._config.timeout_s, self._measured_s)

    def remember(self, saves_s: Sequence[float]) -> None:
        """Count the durations of saves by earlier starts of this run as if this process had measured them."""
        self._measured_s += saves_s

    def phase(self, rank: int) -> str:
        """The phase of the save in which a rank is; for other ranks, as far as their files on disk show it."""
        if rank == self._world.rank:
            return "waiting for all ranks to begin" if self._writer is None else self._writer.phase
        return seen_on_disk(self.root, rank, data_file_name(rank))

    def time_is_up(self) -> bool:
        """Whether this rank's clock asks for a save (`every_minutes`); ranks have to agree before they `save`. Rank 0
        alone decides about an automatic interval, because ranks measure different times for a save."""
        minutes, passed_s = self._config.every_minutes, time.monotonic() - self._last_save
        if minutes == "auto":
            return self._config.is_automatic and self._world.is_main and passed_s >= self._interval_s()
        return minutes is not None and passed_s >= 60 * minutes

    def _interval_s(self) -> float:
        """Seconds between automatic saves, such that the longest save so far takes at most the share `COST` of them."""
        return max(LEAST_S, max(self._measured_s, default=0.0) / COST)

    def describe_default(self) -> str:
        """One line on automatic saves; empty if the settings say when to save."""
        if not self._config.is_automatic:
            return ""
        return (
            f"a checkpoint every {self._interval_s() / 60:,.0f} minutes, or less often if saves take long: after "
            f"the first, at most {100 * COST:g} % of the time (checkpoint.every_minutes=auto)"
        )

    def due(self, step: int, *, is_last: bool = False, requested: bool = False) -> bool:
        """Whether to save after `step`; `requested`: the ranks have agreed to, because of the time or a preemption."""
        every = self._config.every_steps
        by_count = every is not None and step % every == 0
        return (by_count or requested or (is_last and self._config.at_end)) and step != self.last_step

    def save(self, run: RunState, is_last: bool = False) -> SaveReport | None:
        """Write a checkpoint of the state after `run.step`; collective.

        With `async_save` it returns `None` as soon as training may continue, and the next `save` or `wait` passes the
        report to `on_done`. There are never two saves at once: a save waits for the save before it.

        A disk that is full or fails ends the save, not the run: the report says why, and `failures` counts it.
        `is_last`: the run ends after this save, so a warning about its failure does not say that the run goes on.
        """
        began = time.monotonic()
        self.wait()
        self._writer = None
        try:
            self.meet(self._meeting_s)
        except RuntimeError as error:
            missing = str(error).splitlines()[0]
            raise CheckpointError(
                f"not all ranks came to save step {run.step} within {self._meeting_s:g} s: {missing}",
                "look at the missing ranks' logs; every rank has to call save after the same step",
            ) from error
        shards = [s for s in self._strategy.shards() if s.name not in self._left_out and s.local.numel()]
        for kind, state in rng.capture(self._world.device).items():
            shards.append(Shard(f"rng.{self._world.rank}.{kind}", tuple(state.shape), 0, state))
        scalars = self._strategy.scalars()
        run = storable(run, scalars)
        if self._config.async_save:
            shards = self._staging.copy(shards)
        final, world, name = self.root / layout.folder_name(run.step), self._world, self._strategy.name
        self._writer = writer = RangeWriter(final, world.rank, run, name, world.size, scalars, self._fence)
        self._last_save, self.last_step, self._run_ends = time.monotonic(), run.step, is_last
        if not self._config.async_save:
            return self._finished(self._write(writer, shards, run.step, began, None))
        args = writer, shards, run.step, began, time.monotonic() - began
        self._thread = threading.Thread(target=self._write_in_thread, args=args, name="checkpoint", daemon=True)
        self._thread.start()
        return None

    def meet(self, within_s: float) -> None:
        """Wait `within_s` at most until all ranks have called this; a RuntimeError names those that are missing."""
        self.wait()  # a save in the background uses the same group
        dist.monitored_barrier(self.group, timeout=timedelta(seconds=within_s), wait_all_ranks=True)

    def _write_in_thread(self, *args: object) -> None:
        # This thread, and those that it starts, use only idle cores: on Linux each thread has its own niceness.
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, min(19, os.getpriority(os.PRIO_PROCESS, thread_id) + 10))
        try:
            self._ended = self._write(*args)  # type: ignore[arg-type]
        except BaseException as error:  # handed to the thread that waits
            self._ended = error

    def _write(
        self, writer: RangeWriter, shards: list[Shard], step: int, began: float, blocking_s: float | None
    ) -> SaveReport:
        problem: str | None = None
        try:
            writer.write(shards, self._chunk_bytes, self.group)
            if self._world.is_main:
                try:
                    layout.point_latest(self.root)
                    for path in layout.prune(self.root, self._config.keep_last, self._config.keep_best):
                        _LOG.info("deleted %s", path.name)
                except OSError as error:  # it does not harm the checkpoint that was just made
                    _LOG.warning("%s: %s", self.root, error)
        except RankFailure as failure:
            cause = failure.error
            if self._world.is_main and not isinstance(cause, SupersededError):  # its draft may be the new owner's
                shutil.rmtree(writer.draft, ignore_errors=True)
            if not isinstance(cause, OSError):
                raise cause from failure
            problem = f"rank {failure.rank}: {cause.strerror or cause}"
        total = time.monotonic() - began
        staged = self._staging.n_bytes if self._config.async_save else 0
        return SaveReport(step, writer.final, total if blocking_s is None else blocking_s, total, staged, problem)

    @property
    def saves_now(self) -> bool:
        """Whether a background save has begun and `wait` has not returned its report yet."""
        return self._thread is not None

    def wait(self) -> SaveReport | None:
        """Wait for the background save and return its report; `None` if there is no such save."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        ended, self._ended = self._ended, None
        if isinstance(ended, BaseException):
            raise ended
        assert ended is not None
        return self._finished(ended)

    def _finished(self, report: SaveReport) -> SaveReport:
        """Note the outcome of a save, warn of a failure, and call `on_done`."""
        self.last_report = report
        if report.error is None:
            self._measured_s.append(report.total_s)
        else:
            self.failures += 1
            if self._world.is_main:
                goes_on = "" if self._run_ends else ", the run goes on"
                _LOG.warning("checkpoint of step %d failed%s: %s", report.step, goes_on, report.error)
        if self._on_done is not None:
            self._on_done(report)
        return report

    def resume(
        self, source: str | Path, accept: Callable[[RunState], None] | None = None
    ) -> tuple[Path, RunState] | None:
        """Load a checkpoint into the strategy: the newest intact one of a run or folder, or the one at `source`.
        Collective.

        `accept`: raises if the run's state does not suit the caller; called before anything is changed. Returns the
        checkpoint's path and the state of its run; `None` if there is no checkpoint.
        """
        from .resume import resume

        folder, on_corrupt = Path(source), self._config.on_corrupt
        loaded = resume(self._strategy, self._world, self.group, folder, on_corrupt, self.root, accept, self._left_out)
        if loaded is not None:
            self.last_step = loaded[1].step if loaded[0].parent.resolve() == self.root.resolve() else None
        return loaded

    def check_last(self) -> None:
        """Wait for the background save and check that the last save succeeded; all ranks come to the same result."""
        self._run_ends = True
        self.wait()
        report = self.last_report
        if report is None or report.error is None:
            return
        remaining = layout.checkpoints(self.root)
        goes_on = f"from {remaining[0].name}" if remaining else "from the start, as there is no checkpoint"
        raise SaveError(
            f"the last save, of step {report.step}, failed: {report.error}",
            f"free space or repair the disk, and start again with run.resume=true: it goes on {goes_on}",
        )

    def close(self, failed: bool = False) -> None:
        """Wait for the background save and destroy its process group. `failed`: an error already ends the run; an error
        of this call is logged, not raised in its place."""
        self._run_ends = True
        try:
            self.wait()
        except Exception as error:
            if not failed:
                raise
            _LOG.warning("the checkpoint being written was lost: %s", error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group(self.group)
