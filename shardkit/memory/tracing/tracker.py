"""Track every tensor's storage through part of a training: live bytes and their peak, per device.

For a traced step and for tests, not for every step: it adds some 10 µs to each operator.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..state import local_tensors
from .compat import DEVICE, DispatchMode, Patches, schema, tensors
from .events import EventLog
from .scratch import may_take_scratch, scratch

Device = str | torch.device
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")
"""Operators that take the matrix library's workspace."""
_LAST_FIRST = ("aten::native_dropout",)
"""Operators whose kernels make the last result first."""


class _Storage:
    __slots__ = ("device", "index", "label", "n_bytes", "ref")

    def __init__(self, device: str, label: str | None, index: int) -> None:
        self.device, self.label, self.n_bytes, self.index = device, label, 0, index
        self.ref: weakref.ref[torch.UntypedStorage] | None = None


class TensorTracker(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensor storages while it is entered, on every device, real or fake.

    Each storage counts once, with its full size, from the moment an operator returns a tensor on it until its last
    reference is gone; storages made earlier count from `see` on. In-place growth, `out=`, collectives and
    `UntypedStorage.resize_` (which FSDP2 uses to free parameters) are tracked. DTensors and other wrapper subclasses
    count as the local tensors inside them; the fake tensors of DTensor's sharding propagation do not count. Backward is
    tracked on any thread: autograd passes the caller's dispatch mode to its device threads. The work per operator does
    not grow with the number of live storages.

    Not counted: scratch memory inside a kernel, regions compiled by torch.compile, and memory outside tensors. A
    storage over foreign memory (numpy, mmap) counts in full once an operator returns a view of it. With fake tensors,
    enter the tracker inside the `FakeTensorMode`.

    Peaks count from the first `__enter__`; a tracker that is entered again continues counting.

    `log`: receives every event. `ran`: called with every operator, its arguments and its result.
    """

    def __init__(self, log: EventLog | None = None, ran: Callable[[Any, Any, Any, Any], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self._ran = ran
        self._live: dict[int, _Storage] = {}
        self._current: dict[str, int] = {}
        self._ever_allocated: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._phase = "start"
        self._phase_peaks: dict[str, dict[str, int]] = {"start": {}}
        self._lock = threading.RLock()
        self._busy = False
        self._dead: deque[int] = deque()

    def see(self, tree: Any, label: str | None = None) -> None:
        """Count the storages of all tensors in nested containers (or of a module's parameters, gradients and buffers).

        `tree`: tensors in any nesting of lists, tuples and dicts, or a module. `label`: their label in `by_label`.
        """
        if isinstance(tree, torch.nn.Module):
            params = list(tree.parameters())
            tree = [*params, *(p.grad for p in params if p.grad is not None), *tree.buffers()]
        for tensor in tensors(tree):
            self._see(tensor, label)

    def mark(self, phase: str) -> None:
        """From now on peaks also count towards `phase`; a repeated phase keeps its largest peak."""
        with self._updating():
            if self.log is not None:
                self.log.mark(phase)
            self._phase = phase
            peaks = self._phase_peaks.setdefault(phase, {})
            for device, n_bytes in self._current.items():
                peaks[device] = max(peaks.get(device, 0), n_bytes)

    def current(self, device: Device) -> int:
        """Bytes of live storages on a device ("cpu", "cuda:1"; "cuda" = the only GPU in use)."""
        return self._current.get(self._key(device), 0)

    def ever_allocated(self, device: Device) -> int:
        """Bytes of all storages so far on a device, those that are gone too."""
        return self._ever_allocated.get(self._key(device), 0)

    def peak(self, device: Device, phase: str | None = None) -> int:
        """The largest `current` so far, or in one phase."""
        peaks = self._peak if phase is None else self._phase_peaks.get(phase, {})
        return peaks.get(self._key(device), 0)

    def phase_peaks(self, device: Device) -> dict[str, int]:
        """Peak by phase, in order of first `mark`; "start" is the time before any mark."""
        key = self._key(device)
        return {phase: peaks.get(key, 0) for phase, peaks in self._phase_peaks.items()}

    def by_label(self, device: Device) -> dict[str | None, int]:
        """Bytes of live storages by label; `None` for unlabelled ones."""
        key, sums = self._key(device), dict[str | None, int]()
        with self._updating():
            for entry in self._live.values():
                if entry.device == key:
                    sums[entry.label] = sums.get(entry.label, 0) + entry.n_bytes
        return sums

    def __enter__(self) -> TensorTracker:
        Patches.acquire(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        Patches.release(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A wrapper's own dispatch runs first, and calls this mode again with the tensors inside.
        for cls in types:
            if _wraps(cls):
                return NotImplemented
        if func is DEVICE:  # only a query, but as frequent as all operators together
            return getattr(args[0], "fake_device", None) or func(*args)
        out = func(*args, **(kwargs or {}))
        if not Patches.in_propagation():
            traits = _traits(func)
            # The planner's allocator replays allocations in this order, which decides which free block each one gets.
            self._see_result(reversed(out) if traits.is_last_first else out, traits.name, traits.is_older)
            if self.log is not None:
                if traits.may_take_scratch:
                    self._note_scratch(traits.name, scratch(func, args, out))
                if traits.is_product and self.log.product_workspace and isinstance(out, torch.Tensor):
                    with self._updating():
                        self.log.multiplied(str(out.device), traits.name)
            if self._ran is not None:
                self._ran(func, args, kwargs or {}, out)
        return out

    def _see_result(self, out: Any, op: str, is_older: bool) -> None:
        if isinstance(out, torch.Tensor):
            self._see(out, None, op, is_older)
        elif isinstance(out, (list, tuple, reversed)):
            for item in out:
                self._see_result(item, op, is_older)

    def _note_scratch(self, name: str, taken: tuple[torch.device, int] | None) -> None:
        if self.log is not None and taken is not None and taken[1]:
            with self._updating():
                self.log.scratch(str(taken[0]), name, taken[1])

    def _see(self, tensor: torch.Tensor, label: str | None, op: str = "", is_older: bool = False) -> None:
        for local in local_tensors(tensor) if _wraps(type(tensor)) else (tensor,):
            if local.device.type != "meta" and local.layout == torch.strided:
                self._count(local, label, op, is_older)

    def _count(self, local: torch.Tensor, label: str | None, op: str, is_older: bool) -> None:
        storage, log = local.untyped_storage(), self.log
        key = id(storage)  # the object lives as long as the storage itself
        counted = self._live.get(key)
        if counted is not None and label is None and not self._dead and counted.n_bytes == storage.nbytes():
            return  # the usual case: results of views and in-place operators
        with self._updating():
            entry = self._live.get(key)
            if entry is None:
                device = str(local.device)
                entry = self._live[key] = _Storage(device, label, -1 if log is None else log.made(device, op))
                entry.ref = weakref.ref(storage, functools.partial(self._forget, key))
                if log is not None:
                    allocation = log.allocations[entry.index]
                    allocation.shape, allocation.is_older = tuple(local.shape), is_older
            elif label is not None:
                entry.label = label
            if log is not None and label is not None:
                log.labelled(entry.index, label)
            self._resized(entry, storage.nbytes())

    def recount(self, storage: torch.UntypedStorage) -> None:
        """Update a storage's size after `UntypedStorage.resize_`; unknown storages stay uncounted."""
        with self._updating():
            entry = self._live.get(id(storage))
            if entry is not None:
                self._resized(entry, storage.nbytes())

    def _forget(self, key: int, _: object) -> None:
        """Handle the end of a storage. Garbage collection may call this during an update: then only queue it."""
        self._dead.append(key)
        with self._lock:
            if not self._busy:
                self._bury()

    def _updating(self) -> _Update:
        """Guard an update: remove dead storages before it (their addresses may be reused) and after it."""
        return _Update(self)

    def _bury(self) -> None:
        while self._dead:
            self._resized(self._live.pop(self._dead.popleft()), 0)

    def _resized(self, entry: _Storage, n_bytes: int) -> None:
        if n_bytes == entry.n_bytes:
            return
        device = entry.device
        if self.log is not None:
            self.log.changed(entry.index, n_bytes - entry.n_bytes)
        current = self._current[device] = self._current.get(device, 0) + n_bytes - entry.n_bytes
        self._ever_allocated[device] = self._ever_allocated.get(device, 0) + max(0, n_bytes - entry.n_bytes)
        entry.n_bytes = n_bytes
        if current > self._peak.get(device, 0):
            self._peak[device] = current
        peaks = self._phase_peaks[self._phase]
        if current > peaks.get(device, 0):
            peaks[device] = current

    def _key(self, device: Device) -> str:
        asked_device = torch.device(device)
        if asked_device.type == "cpu" or ":" in str(asked_device):
            return str(asked_device)
        used = sorted(key for key in self._current if torch.device(key).type == asked_device.type)
        if len(used) > 1:
            raise ValueError(f"{device} is ambiguous: tensors were seen on {', '.join(used)}")
        return used[0] if used else str(asked_device)


class _Update:
    """The context of an update of a tracker; it may be within another one. See `TensorTracker._updating`."""

    __slots__ = ("_before", "_tracker")

    def __init__(self, tracker: TensorTracker) -> None:
        self._tracker, self._before = tracker, False

    def __enter__(self) -> None:
        tracker = self._tracker
        tracker._lock.acquire()
        tracker._bury()
        self._before, tracker._busy = tracker._busy, True

    def __exit__(self, *raised: object) -> None:
        tracker = self._tracker
        tracker._busy = self._before
        try:
            tracker._bury()
        finally:
            tracker._lock.release()


class _Traits(NamedTuple):
    """What is known about an operator before it runs."""

    name: str
    is_older: bool  # its results lie in the memory of its arguments: views, and what it writes to
    is_last_first: bool  # its kernel makes the last result first
    is_product: bool  # it takes the matrix library's workspace
    may_take_scratch: bool  # it takes scratch memory on some kind of device


@functools.cache
def _traits(func: Any) -> _Traits:
    name = schema(func).name
    return _Traits(
        name,
        is_older=any(result.alias_info is not None for result in schema(func).returns),
        is_last_first=name in _LAST_FIRST,
        is_product=name in PRODUCTS,
        may_take_scratch=may_take_scratch(func),
    )


@functools.cache
def _wraps(cls: type) -> bool:
    """Whether a tensor subclass holds its data in other tensors."""
    return hasattr(cls, "__tensor_flatten__")
