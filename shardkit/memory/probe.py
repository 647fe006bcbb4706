"""Read the memory of the device, the process, its host, its state and its phases; nothing here waits for the device."""

from __future__ import annotations

import logging
import os
import re
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import psutil
import torch
from torch import nn

from ..errors import gib
from ..files import memory_limits
from .rows import KINDS, PhaseMemory, PhaseName, RankRow, StateBytes, StateKind

_KIB = 1024


class DeviceCounters(NamedTuple):
    """The counters of one device's caching allocator, in bytes; peaks since the last `reset_peak`."""

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    alloc_retries: int
    ooms: int


class DeviceProbe:
    """The device allocator's statistics.

    Only CUDA's allocator keeps them: on the CPU, and on other devices, `read` returns `None`.
    """

    def __init__(self, device: torch.device) -> None:
        self.name = device.type  # the device's product name, or its type
        self.total: int | None = None  # bytes of the device's memory; `None` on CPU
        self._index: int | None = None
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index
            properties = torch.cuda.get_device_properties(self._index)
            self.name, self.total = properties.name, int(properties.total_memory)

    def read(self) -> DeviceCounters | None:
        """Counters kept on the host by the allocator: no device synchronisation."""
        if self._index is None:
            return None
        # The nested form is what the C++ side returns; memory_stats() would flatten and sort it first.
        stats = torch.cuda.memory_stats_as_nested_dict(self._index)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return DeviceCounters(
            allocated=allocated["current"],
            peak_allocated=allocated["peak"],
            reserved=reserved["current"],
            peak_reserved=reserved["peak"],
            alloc_retries=stats["num_alloc_retries"],
            ooms=stats["num_ooms"],
        )

    def in_use(self) -> int | None:
        """Bytes of the device that any process holds, according to the driver; does not wait for the device."""
        if self._index is None:
            return None
        free, total = torch.cuda.mem_get_info(self._index)
        return int(total - free)

    def reset_peak(self) -> None:
        """Reset the peaks to the current values, those of `torch.cuda.max_memory_allocated` included."""
        if self._index is not None:
            torch.cuda.reset_peak_memory_stats(self._index)


class HostCounters(NamedTuple):
    """Resident bytes of this process: now, and their peak since the last `reset_peak`."""

    rss: int
    peak_rss: int


class HostProbe:
    """This process's resident memory.

    Linux: VmRSS and VmHWM of /proc/self/status, VmHWM reset through /proc/self/clear_refs (10 µs each; psutil's RSS
    alone takes 15 µs). The reset also lowers `getrusage`'s ru_maxrss.
    Elsewhere, or if clear_refs cannot be written: psutil and ru_maxrss, which only ever grows. `peak_rss` is then
    exact if it grew since the reset, and otherwise the larger of RSS at the reset and now (a lower bound).
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        # Both files stay open. The kernel computes their content anew at each read from offset 0.
        self._status = _open("/proc/self/status", os.O_RDONLY)
        self._clear_refs = _open("/proc/self/clear_refs", os.O_WRONLY)
        for descriptor in (self._status, self._clear_refs):
            if descriptor is not None:
                weakref.finalize(self, os.close, descriptor)
        # whether peaks are exact between resets
        self.resettable = self._status is not None and self._clear_refs is not None
        self._at_reset: tuple[int, int] | None = None
        self.reset_peak()

    def read(self) -> HostCounters:
        rss, peak = self._rss_and_peak()
        # ru_maxrss has not grown since the reset, so the peak in between is unknown: take the larger of both ends.
        if not self.resettable and self._at_reset is not None and peak == self._at_reset[1]:
            peak = max(rss, self._at_reset[0])
        # ru_maxrss and psutil's RSS are read at two moments, so RSS may be the larger one.
        return HostCounters(rss, max(rss, peak))

    def reset_peak(self) -> None:
        """Reset the peak to the current RSS."""
        if self._clear_refs is not None:
            try:
                os.pwrite(self._clear_refs, b"5", 0)  # 5: reset VmHWM (Linux, Documentation/filesystems/proc.rst)
            except OSError:  # openable but refused: some container sandboxes
                self._clear_refs, self.resettable = None, False
        if not self.resettable:
            self._at_reset = self._rss_and_peak()

    def _rss_and_peak(self) -> tuple[int, int]:
        if self._status is not None:
            text = os.pread(self._status, 4096, 0)
            return _kib_field(text, b"\nVmRSS:"), _kib_field(text, b"\nVmHWM:")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(self._process.memory_info().rss), peak * (1 if sys.platform == "darwin" else _KIB)

    def uss(self) -> int:
        """Bytes that would be freed if this process ended: walks the page tables, 2–15 ms."""
        return int(self._process.memory_full_info().uss)

    def children_rss(self) -> int:
        """Sum of the RSS of all descendants, mostly data-loader workers; shared pages count for each process."""
        total = 0
        for child in self._process.children(recursive=True):
            with suppress(psutil.Error):  # it ended meanwhile
                total += int(child.memory_info().rss)
        return total


def _open(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags)
    except OSError:
        return None


def _kib_field(text: bytes, name: bytes) -> int:
    start = text.index(name) + len(name)
    return int(text[start : text.index(b"kB", start)]) * _KIB


# How much host memory this process may use, by its cgroup's limit or the machine's memory, and how much is in use.


@dataclass(frozen=True)
class HostLimit:
    """A limit on host memory."""

    n_bytes: int  # the limit in bytes
    folder: Path | None = None  # the cgroup that sets it; `None`: the machine

    def in_use(self) -> int:
        """Bytes that all processes under this limit hold and the kernel cannot reclaim; file caches do not count.

        Takes 50 µs, or 70 µs for a cgroup. A cgroup that is gone counts as empty.
        """
        if self.folder is None:
            memory = psutil.virtual_memory()
            return int(memory.total - memory.available)
        usage, caches = _COUNTERS[(self.folder / "memory.current").exists()]
        try:
            used = int((self.folder / usage).read_text())
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        except OSError:
            return 0
        # The two files are read one after the other, so the caches may exceed the usage read before.
        return max(0, used - sum(int(stat.get(name, 0)) for name in caches))


# Is it a cgroup of version 2? → the file with its usage, and the counters of memory that the kernel can reclaim.
_COUNTERS = {
    True: ("memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
    False: ("memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def tightest_limit() -> HostLimit:
    """The tightest cgroup limit above this process, or the machine's memory if that is less."""
    machine = HostLimit(int(psutil.virtual_memory().total))
    return min([*starmap(HostLimit, memory_limits()), machine], key=lambda limit: limit.n_bytes)


_LOG = logging.getLogger(__name__)
SHARE = 0.95
"""Share of the host's limit above which the kernel may kill a rank at any moment."""


class HostRisk:
    """Checks the rows of each gather; it does nothing between gathers."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share  # share of the host's limit in use at which it warns
        # called on a rank whose host gets near its limit, with the rank's row; again only after it was below
        self.on_risk: Callable[[RankRow], None] | None = None
        self._near = False
        self._warned_hosts: set[str] = set()

    def look(self, own_row: RankRow, rows: Sequence[RankRow]) -> None:
        """Call on every rank; `rows` are all ranks' on rank 0, which warns once per host."""
        near, self._near = self._near, self._is_near(own_row)
        if self._near and not near and self.on_risk is not None:
            self.on_risk(own_row)
        for row in rows:
            host = row.identity.host
            if host not in self._warned_hosts and self._is_near(row):
                self._warned_hosts.add(host)
                _LOG.warning("%s", describe([neighbour for neighbour in rows if neighbour.identity.host == host]))

    def _is_near(self, row: RankRow) -> bool:
        host = row.host_mem
        return host.in_use is not None and host.in_use >= self.share * host.limit


def used_by(row: RankRow) -> int:
    """Bytes that a rank and its loader processes have in memory; shared pages count for each process."""
    return row.host_mem.rss + (row.host_mem.children_rss or 0)


def describe(rows: Sequence[RankRow]) -> str:
    """One line on the memory of one host, and on the rank that holds most of it."""
    worst = max(rows, key=used_by)
    memory = worst.host_mem
    workers = f", {gib(memory.children_rss)} of it in loader processes" if memory.children_rss else ""
    share = 100 * (memory.in_use or 0) / memory.limit
    return (
        f"host memory is almost used up on {worst.identity.host}: {gib(memory.in_use or 0)} of {gib(memory.limit)} "
        f"({share:.0f} %); among its {len(rows)} rank(s), rank {worst.identity.rank} holds most: {gib(used_by(worst))}"
        + workers
    )


# Bytes of parameters, gradients and optimizer state, counted from the storages that hold them.

_PLAIN = (torch.Tensor, nn.Parameter)
_ORDER = {kind: order for order, kind in enumerate(KINDS)}


class HasState(Protocol):
    """Anything that can list its state, as every strategy can. Lower packages know nothing else of an engine."""

    def state_tensors(self) -> Iterable[tuple[StateKind, torch.Tensor]]:
        """Every local tensor that holds state; the same storage may come more than once."""


def module_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """State of a plain, DDP or FSDP2 module and of torch optimizers.

    Parameters that only an optimizer holds (fp32 masters of a mixed-precision wrapper) are `master_params`.
    """
    model_params = set()
    # The functions of the class, not the methods: Megatron's DDP has a list in place of the method `buffers`.
    for param in nn.Module.parameters(model):
        model_params.add(id(param))
        yield from weight_state(param)
        if param.grad is not None:
            yield "grads", param.grad
    for buffer in nn.Module.buffers(model):
        yield "buffers", buffer
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in model_params:
                    yield "master_params", param
                    if param.grad is not None:
                        yield "grads", param.grad
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield "optimizer", value


def weight_state(param: torch.Tensor) -> Iterator[tuple[StateKind, torch.Tensor]]:
    """A parameter with its category: `quantized` for integers, which are the packed bytes or the scales of a weight.

    bitsandbytes keeps scales and levels in a `quant_state` beside its own parameters in 4 bits, whose packed bytes may
    be stored in any type.
    """
    quantized = getattr(param, "quant_state", None)
    is_plain = param.is_floating_point() or param.is_complex() or param.dtype == torch.bool
    yield "params" if is_plain and quantized is None else "quantized", param
    while quantized is not None:
        for name in ("absmax", "code", "offset"):
            tensor = getattr(quantized, name, None)
            if isinstance(tensor, torch.Tensor):
                yield "quantized", tensor
        quantized = getattr(quantized, "state2", None)


def local_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors of this rank inside a DTensor or another wrapper subclass; a plain tensor itself."""
    flatten = None if type(tensor) in _PLAIN else getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from local_tensors(inner)


def page_locked(n_bytes: int) -> int:
    """Bytes that torch's allocator of pinned memory takes for `n_bytes`: a power of two (torch 2.9 to 2.15).

    PYTORCH_ALLOC_CONF may limit that: `pinned_max_round_threshold_mb`, `pinned_max_cached_size_mb`.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    limits = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb:(\d+)", settings)
    if any(n_bytes > int(limit) << 20 for limit in limits):
        return n_bytes
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0


def count_state(tensors: Iterable[tuple[StateKind, torch.Tensor]], device: torch.device) -> dict[StateKind, StateBytes]:
    """Bytes per category, on the training device and on the host.

    A storage counts once and whole, however many views of it come: a flat buffer behind several parameters counts with
    its padding, pinned memory as torch rounds it up. A storage in several categories belongs to the first of them in
    the order of `KINDS`. Meta tensors and freed storages have no bytes.

    `device`: where the model trains. If it is the CPU, tensors there count as `device`; otherwise tensors on the CPU,
    pinned or not, count as `host`.
    """
    seen: dict[tuple[object, int], tuple[int, int, bool]] = {}
    elsewhere = device.type != "cpu"
    for kind, tensor in tensors:
        order = _ORDER[kind]
        for local in (tensor,) if type(tensor) in _PLAIN else local_tensors(tensor):
            storage = local.untyped_storage()
            n_bytes = storage.nbytes()
            local_device = local.device
            if n_bytes == 0 or local_device.type == "meta":
                continue
            # Two storages over the same memory (DLPack, set_) share the address; those of fakes, on meta, have none.
            key = ("fake", id(storage)) if storage.device.type == "meta" else (local_device, storage.data_ptr())
            # Pinned memory is rounded up once for each storage, as torch allocates it, not for each tensor.
            counted = seen.get(key)
            if counted is None or order < counted[0]:
                on_host = elsewhere and local_device.type == "cpu"
                if on_host and local.is_pinned():
                    n_bytes = page_locked(n_bytes)
                seen[key] = (order, n_bytes, on_host)
    sums = {kind: [0, 0] for kind in KINDS}
    for order, n_bytes, on_host in seen.values():
        sums[KINDS[order]][on_host] += n_bytes
    return {kind: StateBytes(*sums[kind]) for kind in KINDS}


# Peaks of the phases that run, kept between gathers.


class Phases(Protocol):
    """A listener of a training step: it hears which phase runs, and sees the state once gradients are complete.

    The ledger listens to every step. A profiler, a traced step and the planner listen too, and forward to a ledger if
    there is one. Each of them hears the same step, and knows nothing of the engine except its `HasState`.
    """

    def phase(self, name: PhaseName, follows: bool = False) -> AbstractContextManager[None]:
        """Context of one phase; `follows`: it begins where the phase before it ended, with nothing in between."""

    def sample_state(self, source: HasState) -> None:
        """Look at the state now: after the last backward, before the optimizer step."""


@dataclass
class _Peaks:
    """The largest figures so far, and the latest."""

    device: DeviceCounters | None = None
    host: HostCounters | None = None
    stale: bool = False
    stale_host: bool = False

    def add(self, device: DeviceCounters | None, host: HostCounters | None) -> None:
        # Peaks are the largest over all runs of the phase; the other figures are those of its last end.
        if device is not None:
            if self.device is not None:
                allocated = max(device.peak_allocated, self.device.peak_allocated)
                reserved = max(device.peak_reserved, self.device.peak_reserved)
                device = DeviceCounters(
                    device.allocated, allocated, device.reserved, reserved, device.alloc_retries, device.ooms
                )
            self.device = device
        if host is not None:
            if self.host is not None:
                host = HostCounters(host.rss, max(host.peak_rss, self.host.peak_rss))
            self.host = host

    def forget(self, host: bool) -> None:
        """Drop the previous interval's figures; the host's only if they will be read again."""
        if self.stale:
            self.device, self.stale = None, False
        if self.stale_host and host:
            self.host, self.stale_host = None, False


Doing = PhaseName | Literal["save"]


@contextmanager
def doing(name: Doing) -> Iterator[None]:
    """Mark an exception from inside as raised while doing this; nothing is measured."""
    try:
        yield
    except Exception as error:
        note_phase(error, name)
        raise


def note_phase(error: BaseException, name: Doing) -> None:
    """Record on an exception the phase it came from; the innermost phase records first and stays."""
    if phase_of(error) is None:
        error.shardkit_phase = name  # type: ignore[attr-defined]


def phase_of(error: BaseException) -> Doing | None:
    """The phase that an exception came from; `None` outside of all phases."""
    return getattr(error, "shardkit_phase", None)


class PhaseMeter:
    """Reads both probes at the edges of phases; each reading covers the time since the one before it."""

    def __init__(self, device: DeviceProbe, host: HostProbe) -> None:
        self._device, self._host = device, host
        # whether the host's memory is read there; while it is not, phases keep their figures of it
        self.reads_host = True
        self._overall = _Peaks()
        self._phases: dict[PhaseName, _Peaks] = {}
        self._open: list[PhaseName] = []

    @property
    def current(self) -> PhaseName | None:
        return self._open[-1] if self._open else None

    def begin(self, name: PhaseName, follows: bool = False) -> None:
        """Peaks until now belong to the phases already open (and to the run); the new phase's start here.

        `follows`: nothing happened since the last phase ended, so its reading serves here too.
        """
        if not follows:
            self._read()
        self._enter(name)

    def change(self, name: PhaseName) -> None:
        """`end`, and `begin` at the same moment: one reading serves both."""
        # Read before the pop: the peak since the last reading belongs to the phase that ends.
        self._read()
        self._open.pop()
        self._enter(name)

    def _enter(self, name: PhaseName) -> None:
        self._device.reset_peak()
        if self.reads_host:
            self._host.reset_peak()
        peaks = self._phases.setdefault(name, _Peaks())
        peaks.forget(self.reads_host)
        self._open.append(name)

    def end(self) -> None:
        self._read()
        self._open.pop()

    def overall(self) -> tuple[DeviceCounters | None, HostCounters]:
        """Figures now, with peaks since this meter was created."""
        self._read(self._host.read())
        assert self._overall.host is not None
        return self._overall.device, self._overall.host

    def rows(self) -> dict[PhaseName, PhaseMemory]:
        """Every phase that has run; one that did not run since the last gather keeps its figures."""
        rows = {}
        for name, peaks in self._phases.items():
            if peaks.host is not None:
                device = peaks.device
                nothing = PhaseMemory(None, None, None, None, *peaks.host)
                rows[name] = nothing if device is None else PhaseMemory(*device[:4], *peaks.host)
        return rows

    def start_interval(self) -> None:
        """From now on, a phase's first run replaces its figures."""
        # Figures become stale and are not dropped: a phase that does not run again is still in the next row.
        for name, peaks in self._phases.items():
            peaks.stale = peaks.stale_host = name not in self._open

    def _read(self, host: HostCounters | None = None) -> None:
        device = self._device.read()
        if self.reads_host:
            host = host or self._host.read()
        self._overall.add(device, host)
        # Every open phase gets the reading: the peaks of an outer phase cover those of the phases within it.
        for name in self._open:
            self._phases[name].add(device, host)
