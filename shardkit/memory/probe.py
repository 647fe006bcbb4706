"""Read memory counters of the device and of this process; nothing here waits for the device."""

from __future__ import annotations

import os
import resource
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

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
        return sum(_rss(pid) for pid in _descendants(os.getpid()))


def _open(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags)
    except OSError:
        return None


def _kib_field(text: bytes, name: bytes) -> int:
    start = text.index(name) + len(name)
    return int(text[start : text.index(b"kB", start)]) * _KIB


def _rss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it ended meanwhile
        return 0


def _descendants(pid: int) -> list[int]:
    """Process ids below `pid`. Reads the kernel's own lists, since psutil would scan every process of the machine."""
    tasks = Path(f"/proc/{pid}/task")
    if not (tasks / str(pid) / "children").exists():  # not Linux, or a kernel without CONFIG_PROC_CHILDREN
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    descendants, pending = [], [pid]
    while pending:
        current = pending.pop()
        children: list[int] = []
        for task in _listed(Path(f"/proc/{current}/task")):
            children += _pids(task / "children")
        descendants += children
        pending += children
    return descendants


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the process ended meanwhile
        return []


def _pids(path: Path) -> list[int]:
    try:
        return [int(pid) for pid in path.read_text().split()]
    except OSError:
        return []
