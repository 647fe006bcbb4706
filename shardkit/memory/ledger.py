"""The always-on account of every rank's memory, gathered on rank 0 in one collective."""

from __future__ import annotations

import linecache
import math
import os
import pickle
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError, TrainingError
from .probe import (
    SHARE,
    DeviceProbe,
    HasState,
    HostProbe,
    HostRisk,
    PhaseMeter,
    count_state,
    module_state,
    note_phase,
    tightest_limit,
)
from .rows import (
    PHASES,
    DeviceMemory,
    HostMemory,
    Identity,
    PhaseName,
    RankRow,
    StateBytes,
    StateKind,
    phase_name,
)
from .tracing.compat import allocator_snapshot, keep_stacks

ROW_BYTES = 4096
"""Bytes that each rank sends: a row with every phase takes some 1,500, and long names of hosts and devices 500 more."""
SETTLE_S = 5.0
"""Seconds that rank 0 waits for the others' notes after a gather failed: some ranks are merely late."""
# gloo's message without the source file before it and the advice after it.
_NOISE = re.compile(r"^(?:\[[^\]]*\] )?(.*?)(?:\. This is typically.*)?$", re.DOTALL)
SLOW_PROBE_SHARE = 0.001
"""USS and children's RSS take at most this share of the run's time."""


# Device memory that grows with every step: kept graphs, lists of outputs, caches without a limit.

GATHERS = 7
"""Gathers that growth is read from. Held batches of any length rise that often in a row in one of 5,040 runs."""
SMALLEST = 0.002
"""The part of the peak that must come with each gather: lists of losses grow, too, and fill no card."""
UNEVEN = 5
"""A leak leaves about as much behind in each step; a cache that warms up leaves less and less."""
MOST_CHARACTERS = 300
"""Of the line that makes what stays; a row of the ledger has a fixed size."""
BEFORE, AFTER = 2, 6
"""Steps after which the lines of live tensors are compared, once memory grows. What a step leaves to the next one only,
as its loss or a prefetched batch, is there at both ends."""
_BENEATH = (
    os.path.join("site-packages", "torch", ""),
    os.path.dirname(os.__file__) + "/",
    __package__.replace(".", "/"),
)


class Growth:
    """Compares a rank's memory at the ends of steps, from gather to gather."""

    def __init__(self) -> None:
        # that each of the last steps left behind on the device; `None` if memory does not grow
        self.bytes_a_step: int | None = None
        # `FILE:NUMBER: TEXT` of the line that makes most of them; `None` before it was looked for
        self.line: str | None = None
        self._n_looked = 0  # steps since the allocator keeps stacks
        self._earlier: Counter[tuple[str, int]] = Counter()
        self._gathers: deque[tuple[int, int, int]] = deque(maxlen=GATHERS)

    def add(self, step: int, row: RankRow) -> None:
        if row.device_mem is None or step <= 2:  # the first steps create optimizer states and buffers
            return
        allocated = row.device_mem.allocated
        peaks = [row.phases[name].peak_allocated or 0 for name in ("forward", "backward") if name in row.phases]
        self._gathers.append((step, allocated, max(peaks, default=allocated)))
        self.bytes_a_step = self._read(row.device_mem.peak_allocated)

    def end_step(self, device: torch.device) -> None:
        """Look for the line once memory grows: stacks cost each allocation some microseconds for these steps."""
        if self.line or (self.bytes_a_step is None and self._n_looked == 0):
            return
        if self._n_looked == 0 and not keep_stacks(True):
            return  # the profiler records just now
        if self._n_looked == BEFORE:
            self._earlier = _alive(device)
        self._n_looked += 1
        if self._n_looked > AFTER:
            grown = _alive(device)
            keep_stacks(False)
            grown.subtract(self._earlier)
            (path, number), n_bytes = max(grown.items(), key=lambda entry: entry[1], default=(("", 0), 0))
            # Less than half of the growth is another line's, or that of memory without a stack.
            if self.bytes_a_step and n_bytes > (AFTER - BEFORE) * self.bytes_a_step / 2:
                self.line = f"{path}:{number}: {linecache.getline(path, number).strip()}"[:MOST_CHARACTERS]
            self._n_looked = 0

    def _read(self, peak: int) -> int | None:
        if len(self._gathers) < GATHERS:
            return None
        (first_step, first, _), *_, (last_step, last, _) = self._gathers
        rates = [(after - before) / (end - begin) for (begin, before, _), (end, after, _) in pairwise(self._gathers)]
        rises = [after - before for (_, before, _), (_, after, _) in pairwise(self._gathers)]
        if min(rises) <= SMALLEST * peak or max(rates) > UNEVEN * min(rates):
            return None
        # Batches that get longer and longer hold more at the end of a step, too, and use still more within it. A leak
        # that is smaller than half of that cannot be told from what the batches hold.
        within = [at_peak - allocated for _, allocated, at_peak in self._gathers]
        if all(after > before for before, after in pairwise(within)) and within[-1] - within[0] > (last - first) / 2:
            return None
        return (last - first) // (last_step - first_step)


def _alive(device: torch.device) -> Counter[tuple[str, int]]:
    """Bytes of the live tensors whose stack was kept, by the innermost line of the program."""
    lines = Counter[tuple[str, int]]()
    for segment in allocator_snapshot(device.index)["segments"]:
        for block in segment["blocks"]:
            frames = block.get("frames") or [] if block["state"] == "active_allocated" else []
            by_program = (frame for frame in frames if not any(part in frame["filename"] for part in _BENEATH))
            if (frame := next(by_program, None)) is not None:
                lines[frame["filename"], frame["line"]] += block["size"]
    return lines


class MemoryLedger:
    """Counts this rank's memory by phase and category and brings every rank's row to rank 0.

    Nothing here waits for the device, and only `gather` (and construction) communicates. A step looks like this:

        ledger.begin_step(step)
        with ledger.phase("forward"): ...    # once per micro-batch
        with ledger.phase("backward"): ...
        ledger.sample_state(strategy)        # gradients are complete now, and the step will drop them
        with ledger.phase("update"): ...
        ledger.end_step(step, step_time_s, data_wait_s)
        rows = ledger.gather(step)           # every few steps, on every rank; rank 0 gets the rows

    `device`: where the model trains. `group`: a gloo group of all ranks that no other thread uses; `None` for a single
    process. `rank, world_size, local_rank`: this rank's place. `host`: this machine's name; default: its host name.
    `interval`: steps between gathers, for `due`. `host_warn`: share of the host's memory in use at which gathers warn.
    `step`: the optimizer step that runs, or ran last; 0 before the first. `gather_s`: the part of `overhead_s` that
    `gather` took.
    """

    def __init__(
        self,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        host: str | None = None,
        *,
        interval: int = 10,
        host_warn: float = SHARE,
    ) -> None:
        began = time.perf_counter()
        if world_size > 1 and group is None:
            raise ConfigError(
                f"MemoryLedger got world_size={world_size} and no process group",
                "pass a gloo group of all ranks, or use MemoryLedger.from_env()",
            )
        self.device = torch.device(device)
        self.rank, self.world_size, self.interval = rank, world_size, interval
        # seconds spent inside the ledger so far, waiting for other ranks in `gather` included
        self.overhead_s = self.gather_s = 0.0
        self.last_rows: list[RankRow] = []  # rank 0: the rows of the last gather; empty elsewhere
        # host memory that background saves keep, for the next row; the caller sets it
        self.staging_bytes = self.step = 0
        self.risk = HostRisk(host_warn)  # the check of the host's memory at each gather
        self._device_probe, self._host_probe = DeviceProbe(self.device), HostProbe()
        self._limit = tightest_limit()
        self._phases = PhaseMeter(self._device_probe, self._host_probe)
        self._growth = Growth()
        self._state: dict[StateKind, StateBytes] | None = None
        self._source: HasState | None = None
        self._due: bool | None = None
        self._steps_done = 0
        self._step_times: list[tuple[float, float, float]] = []
        self._slow: tuple[int | None, int | None, int | None] = (None, None, None)
        self._slow_next = 0.0
        self._identity = Identity(rank, host or socket.gethostname(), local_rank, self._device_probe.name)
        self._group, self._store = group, None if group is None else group.get_group_store()
        self._names = [self._identity.name] * world_size
        if world_size > 1:  # a gather that fails names the missing ranks, which cannot be asked then
            dist.all_gather_object(self._names, self._identity.name, group=group)
        self.overhead_s += time.perf_counter() - began

    @classmethod
    def from_env(cls, device: torch.device | str | None = None, *, interval: int = 10) -> MemoryLedger:
        """A ledger for your own training loop; collective if a process group exists.

        `device`: default: the current GPU, or the CPU if there is none. `interval`: steps between gathers.
        """
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        if not dist.is_initialized():
            return cls(device, interval=interval)
        rank = dist.get_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(device, dist.new_group(backend="gloo"), rank, dist.get_world_size(), local_rank, interval=interval)

    def phase(self, name: PhaseName, follows: bool = False) -> AbstractContextManager[None]:
        """Attribute the memory used inside to a phase: init, wrap, forward, backward or update.

        A phase that runs several times between two gathers keeps its largest peaks. Phases may nest: the outer one's
        peaks cover the inner one's.

        `follows`: it begins where the phase before it ended: one reading serves both, which saves time.
        """
        return _Phase(self, name, follows)

    def begin(self, name: PhaseName, follows: bool = False) -> None:
        """Enter a phase where a `with` block does not fit (hooks)."""
        began = time.perf_counter()
        if name not in PHASES:
            name = phase_name(name)
        if name not in PHASES:
            raise ValueError(f"phase {name!r} is not one of {', '.join(PHASES)}")
        self._phases.begin(name, follows)
        self.overhead_s += time.perf_counter() - began

    def end(self) -> None:
        """Leave the phase that was entered last."""
        began = time.perf_counter()
        self._phases.end()
        self.overhead_s += time.perf_counter() - began

    def change(self, name: PhaseName) -> None:
        """Leave the phase that was entered last, and enter another at the same moment."""
        began = time.perf_counter()
        self._phases.change(name)
        self.overhead_s += time.perf_counter() - began

    @property
    def open_phase(self) -> PhaseName | None:
        """The innermost phase that runs now."""
        return self._phases.current

    def due(self, step: int) -> bool:
        """Whether to gather at `step` (from 1): after the first two, which create state, and every `interval`-th."""
        return step <= 2 or step % self.interval == 0

    def begin_step(self, step: int, due: bool | None = None) -> None:
        """Announce the step, and whether a gather follows it (default: `due`).

        State is counted only then, and the host's memory is read at the edges of phases only then: that costs more
        than everything else here. Its peak over the whole run misses nothing.
        """
        self.step, self._due = step, self.due(step) if due is None else due
        # Until the first gather every step reads the host: the phases have no older figures that a row could show.
        self._phases.reads_host = self._due or not self.gather_s

    def sample_state(self, source: HasState | nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Count state if this step is due; call it after the last backward and before the optimizer step.

        Gradients count as they are now. If there is no optimizer state yet, everything except gradients is counted
        again when the step ends: torch's optimizers create their state in their first step.

        `source`: a strategy, or a module with its `optimizers`.
        """
        began = time.perf_counter()
        due = self.due(self._steps_done + 1) if self._due is None else self._due
        if due:
            self._source = _ModuleState(source, optimizers) if isinstance(source, nn.Module) else source
            self._state = count_state(self._source.state_tensors(), self.device)
        self.overhead_s += time.perf_counter() - began

    def count_state(
        self, tensors: Iterable[tuple[StateKind, torch.Tensor]] | nn.Module, *optimizers: torch.optim.Optimizer
    ) -> dict[StateKind, StateBytes]:
        """Count state now, whether or not a gather is due, and keep it for the next row.

        `tensors`: (kind, tensor) pairs as a strategy yields them, or a module with its `optimizers`.
        """
        began = time.perf_counter()
        pairs = module_state(tensors, *optimizers) if isinstance(tensors, nn.Module) else tensors
        self._state = state = count_state(pairs, self.device)
        self.overhead_s += time.perf_counter() - began
        return state

    def end_step(
        self, step: int, step_time_s: float | None = None, data_wait_s: float = 0.0, busy_s: float | None = None
    ) -> None:
        """End the step; pass its times, as in `time_step`, if they are already known."""
        began = time.perf_counter()
        # The first step creates the optimizer's state after `sample_state`, and may have dropped the gradients by now.
        if self._source is not None and self._state is not None and self._state["optimizer"].total == 0:
            grads = self._state["grads"]
            self._state = {**count_state(self._source.state_tensors(), self.device), "grads": grads}
        self._source, self._due, self._steps_done = None, None, step
        if step_time_s is not None:
            self.time_step(step_time_s, data_wait_s, busy_s)
        self._growth.end_step(self.device)
        self.overhead_s += time.perf_counter() - began

    def time_step(self, step_time_s: float, data_wait_s: float = 0.0, busy_s: float | None = None) -> None:
        """Record a step's times; the next row has their means over the steps since the last gather.

        `step_time_s`: seconds of the whole step. `data_wait_s`: seconds of it that reading data kept the device
        waiting. `busy_s`: seconds without waiting for other ranks, which reveal slow ranks; NaN if they are not known
        of this step. Default: `step_time_s`.
        """
        self._step_times.append((step_time_s, data_wait_s, step_time_s if busy_s is None else busy_s))

    def gather(self, step: int) -> list[RankRow] | None:
        """Bring every rank's row to rank 0, in rank order, in one collective of constant size; `None` on other ranks.

        `step`: the step that has just ended; the same on every rank.
        """
        began = time.perf_counter()
        row = self.row()
        rows = self._collect(step, row)
        self._growth.add(step, row)
        self._phases.start_interval()
        self._step_times.clear()
        self.last_rows = rows
        self.risk.look(row, self.last_rows)
        took = time.perf_counter() - began
        self.gather_s += took
        self.overhead_s += took
        return rows if self.rank == 0 else None

    def _collect(self, step: int, row: RankRow) -> list[RankRow]:
        """Every rank's row on rank 0, in rank order; empty elsewhere."""
        if self._store is None or self.world_size == 1:
            return [row]
        # Not `gather_object`: it first gathers the sizes, a second collective. `pickle.loads` ignores the zeros behind.
        sent = bytearray(pickle.dumps((step, row)).ljust(ROW_BYTES, b"\0"))
        if len(sent) > ROW_BYTES:
            raise ValueError(f"the row of rank {row.name} takes {len(sent)} bytes, more than {ROW_BYTES}")
        received = [bytearray(ROW_BYTES) for _ in range(self.world_size)] if self.rank == 0 else []
        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
        # A failed collective does not say which ranks were missing, so each leaves a note that nobody waits for (2 to
        # 30 µs). `monitored_barrier` would name them too, but every rank would wait for rank 0's answer at each gather.
        self._store.set(_key(self.rank), str(step))
        try:
            dist.gather(torch.frombuffer(sent, dtype=torch.uint8), tensors or None, group=self._group, group_dst=0)
        except RuntimeError as error:
            if self.rank != 0:
                raise
            text = _NOISE.match(" ".join(str(error).split()))
            missing, reason = self._missing(step), text[1] if text else str(error)
            raise TrainingError(
                f"memory was not gathered at step {step}; did not report: {missing}: {reason}",
                "look at those ranks' logs: they were killed, failed, hang, or their node is lost",
            ) from error
        rows = []
        for rank_step, rank_row in map(pickle.loads, received):
            # Steps that differ would put figures of two moments into one line of memory.jsonl.
            if rank_step != step:
                raise RuntimeError(f"rank {rank_row.name} gathers memory at step {rank_step}, rank 0 at step {step}")
            rows.append(rank_row)
        return rows

    def _missing(self, step: int) -> str:
        """The ranks that have not reached the gather after `step`, with their last one."""
        assert self._store is not None
        deadline = time.monotonic() + SETTLE_S
        while True:
            keys = map(_key, range(self.world_size))
            seen = [int(self._store.get(key)) if self._store.check([key]) else None for key in keys]
            missing = [
                f"rank {name} ({'never did' if last is None else f'last at step {last}'})"
                for name, last in zip(self._names, seen, strict=True)
                if last is None or last < step
            ]
            if not missing or time.monotonic() > deadline:
                return ", ".join(missing) or "unknown"
            time.sleep(0.05)

    def row(self) -> RankRow:
        """This rank's row as a gather would send it now."""
        device, host = self._phases.overall()
        began = time.perf_counter()
        if began >= self._slow_next:
            self._slow = self._host_probe.uss(), self._host_probe.children_rss(), self._device_probe.in_use()
            ended = time.perf_counter()
            # The pause grows with the cost of a reading: USS walks the page tables, which is slow in large processes.
            self._slow_next = ended + (ended - began) / SLOW_PROBE_SHARE
        uss, children, on_card = self._slow
        times = [_mean(values) for values in zip(*self._step_times, strict=True)] or [None] * 3
        return RankRow(
            identity=self._identity,
            step_time_s=times[0],
            data_wait_s=times[1],
            busy_s=times[2],
            host_mem=HostMemory(
                host.rss, host.peak_rss, uss, children, self._limit.n_bytes, self.staging_bytes, self._limit.in_use()
            ),
            device_mem=None
            if device is None
            else DeviceMemory(
                *device[:4], self._device_probe.total or 0, on_card, self._growth.bytes_a_step, self._growth.line
            ),
            state=None if self._state is None else dict(self._state),
            phases=self._phases.rows(),
            alloc_retries=None if device is None else device.alloc_retries,
            ooms=None if device is None else device.ooms,
            overhead_s=self.overhead_s,
        )

    def watch(
        self, model: nn.Module, *optimizers: torch.optim.Optimizer, path: str | Path | None = None
    ) -> AbstractContextManager[None]:
        """Account your own loop without changing it: hooks on the model and its optimizers mark the phases.

        See `loop_hooks.LoopHooks`; rank 0 appends a line per gather to `path`.
        """
        from .loop_hooks import LoopHooks

        return LoopHooks(self, model, optimizers, path)

    def table(self, width: int | None = None) -> str:
        """The last gather as a table; empty on ranks other than 0."""
        from .table import render_table

        return render_table(self.last_rows, width) if self.last_rows else ""


def _key(rank: int) -> str:
    return f"shardkit/memory/{rank}"


def _mean(values: Iterable[float]) -> float | None:
    """Mean of the values that are known."""
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else None


class _ModuleState:
    """A module and its optimizers, with a strategy's interface."""

    def __init__(self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self._model, self._optimizers = model, optimizers

    def state_tensors(self) -> Iterable[tuple[StateKind, torch.Tensor]]:
        return module_state(self._model, *self._optimizers)


class _Phase:
    """`with` form of begin and end; a class, since a generator costs twice as much."""

    def __init__(self, ledger: MemoryLedger, name: PhaseName, follows: bool) -> None:
        self._ledger, self._name, self._follows = ledger, name, follows

    def __enter__(self) -> None:
        self._ledger.begin(self._name, self._follows)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            note_phase(error, self._name)
        self._ledger.end()
