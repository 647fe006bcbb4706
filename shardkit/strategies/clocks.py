"""Clocks of a device that works on its own: none of them waits for it until its figure is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

Loss = TypeVar("Loss")


class Mark:
    """A moment: on a GPU the end of all work issued so far, on the CPU now. `later - earlier` is in seconds.

    `time.perf_counter` would give the moment at which the host has issued the work, long before a GPU has done it.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._time = time.perf_counter()
        self._is_past = device.type != "cuda"
        if not self._is_past:
            self._event = torch.Event(device, enable_timing=True)  # a quarter of the cost of torch.cuda.Event
            self._event.record()

    def wait(self) -> Mark:
        """Wait until the moment has come; returns this mark."""
        if not self._is_past:
            self._event.synchronize()
        return self.past()

    def past(self) -> Mark:
        """Declare that the moment is past, because a later one is: `wait` then returns at once. Returns this mark."""
        self._is_past = True
        return self

    def __sub__(self, earlier: Mark) -> float:
        if self._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1000


class HostValue:
    """A 0-d device tensor on its way to the host; reading it waits for the copy only, not for later work of the device.

    `arrived` marks the end of the copy on the device; `time.perf_counter` would mark its launch.
    """

    _free: ClassVar[dict[torch.dtype, list[torch.Tensor]]] = {}
    """Pool of pinned scalars. Allocating a new one makes torch's pinned-memory allocator poll every copy in flight."""

    def __init__(self, value: torch.Tensor, device: torch.device | None = None) -> None:
        """Begin the copy; `arrived` is a moment of `device`, by default the device of the value."""
        self._number: float | None = None
        self._host = value = value.detach()
        self._pool = list[torch.Tensor]()
        if value.device.type == "cuda":
            if type(value) is torch.Tensor:  # not a plan's fake one
                self._pool = self._free.setdefault(value.dtype, self._pool)
            self._host = self._pool.pop() if self._pool else torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
        self.arrived = Mark(device or value.device)  # the moment at which the value is on the host

    def item(self) -> float:
        if self._number is None:
            self.arrived.wait()
            self._number = float(self._host)
            self._pool.append(self._host)
        return self._number


class Stopwatch:
    """Seconds that a device spends between `start` and `stop`, summed over all such pairs.

    Differences of `time.perf_counter` would be the host's time to launch the work, and to wait for it after each pair
    would stop the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Mark, Mark]] = []

    def start(self) -> None:
        self._began = Mark(self._device)

    def stop(self, at: Mark | None = None) -> None:
        """End the span that `start` began, at a mark (default: now)."""
        self._spans.append((self._began, at or Mark(self._device)))

    def seconds(self) -> float:
        """The sum of all spans; waits until the last one has ended."""
        for _, end in self._spans[-1:]:
            end.wait()
        return float(sum(end - begin for begin, end in self._spans))


class GatherWaits:
    """Seconds that forward waits for other ranks, where an engine gathers parameters before a module's forward.

    The device waits, not the host, which `time.perf_counter` would time: a watched step has a hook before and a hook
    after the engine's own on each such module, and both mark moments of the device. `modules`: the modules whose
    parameters are gathered; empty if the engine gathers none in forward, `None` if the waits cannot be told from
    forward.
    """

    def __init__(self, modules: Sequence[nn.Module] | None, device: torch.device) -> None:
        self._modules, self._device = modules, device
        self._in_forward = False

    def around(self, loss: Callable[..., Loss]) -> Callable[..., Loss]:
        """The loss function, with its calls marked as forward: recomputation in backward is not counted."""

        def counted(*args: Any) -> Loss:
            self._in_forward = True
            try:
                return loss(*args)
            finally:
                self._in_forward = False

        return counted

    @contextmanager
    def watching(self, due: bool) -> Iterator[Stopwatch | None]:
        """Watch the step inside if it is due, or if watching costs nothing; yields the waits' stopwatch, or `None`."""
        if self._modules is None or (self._modules and not due):
            yield None
            return
        waits = Stopwatch(self._device)

        def edge(turn: Callable[[], None]) -> Callable[..., None]:
            return lambda *_: turn() if self._in_forward else None

        hooks = [module.register_forward_pre_hook(edge(waits.start), prepend=True) for module in self._modules]
        hooks += [module.register_forward_pre_hook(edge(waits.stop)) for module in self._modules]
        try:
            yield waits
        finally:
            for hook in hooks:
                hook.remove()
