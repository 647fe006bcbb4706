"""Trace one step of a run: the composition of its peak, and memory over time module by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..probe import HasState, Phases, local_tensors
from ..rows import CATEGORIES, Category, PhaseName
from .events import EventLog, Peak, following_modules, repeat_last_step
from .tracker import TensorTracker

BETWEEN = "between"
"""The phase of an event log between two steps."""


class Tracing:
    """Tells a tracker the phases, modules and state tensors of a run.

    It tracks while it is entered. Call `wrapped` once the model exists and `stepped` after each optimizer step; in
    between it replaces the ledger in a training step.
    """

    def __init__(self, tracker: TensorTracker) -> None:
        assert tracker.log is not None
        self._tracker, self._log, self._stack = tracker, tracker.log, ExitStack()

    def __enter__(self) -> Tracing:
        self._stack.enter_context(self._tracker)
        self._tracker.mark("wrap")
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @contextmanager
    def phase(self, name: str, follows: bool = False) -> Iterator[None]:
        self._tracker.mark(name)
        yield

    def sample_state(self, source: HasState) -> None:
        label_state(self._tracker, source)

    def wrapped(self, source: HasState, model: nn.Module) -> None:
        label_state(self._tracker, source)
        self._stack.enter_context(following_modules(self._log, model))

    def stepped(self, source: HasState) -> None:
        label_state(self._tracker, source)
        self._log.mark(BETWEEN, "")

    def repeats(self) -> bool:
        """Log the last step once more, without taking it; False if another one would differ from it."""
        return repeat_last_step(self._log, BETWEEN)


def label_state(tracker: TensorTracker, source: HasState) -> None:
    """Label the storages of parameters, masters, gradients, optimizer state, buffers and gathered parameters."""
    for kind, tensor in source.state_tensors():
        tracker.see(list(local_tensors(tensor)), kind)
    for tensor in getattr(source, "communication_tensors", tuple)():
        tracker.see(tensor, "communication")


SCHEMA = 2
FOLDER = "trace"
POINTS = 1500
LARGEST = 20


class _LedgerAndTracer:
    """Forwards phases and state to both the ledger and the tracer."""

    def __init__(self, ledger: Phases, tracer: Phases, device: torch.device) -> None:
        self._listeners = (ledger, tracer)
        self._device = device
        self.most: int | None = None  # the allocator's largest peak in any phase, in bytes; `None` on the CPU

    @contextmanager
    def phase(self, name: PhaseName, follows: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            for phases in self._listeners:
                stack.enter_context(phases.phase(name, follows))
            yield
        if self._device.type == "cuda":  # read it now: the ledger resets it when the next phase begins
            self.most = max(self.most or 0, torch.cuda.max_memory_allocated(self._device))

    def sample_state(self, source: HasState) -> None:
        for phases in self._listeners:
            phases.sample_state(source)


@contextmanager
def traced_step(
    source: HasState,
    model: nn.Module,
    ledger: Phases,
    device: torch.device,
    step: int,
    save: Callable[[dict[str, Any]], None],
    product_workspace: int = 0,
    data: Iterable[torch.Tensor] = (),
) -> Iterator[Phases]:
    """Trace the step of the wrapped `model` that runs inside; afterwards `save` gets the `summary`.

    `product_workspace`: bytes that cuBLAS keeps for each thread that multiplies. `data`: the step's, as they lie before
    it. Yields the `Phases` that the step uses instead of `ledger`; it forwards to `ledger` too.
    """
    on_gpu = device.type == "cuda"
    log = EventLog()
    if on_gpu:
        log.stream, log.product_workspace = lambda: int(torch.cuda.current_stream().cuda_stream), product_workspace
    tracker = TensorTracker(log)
    with Tracing(tracker) as tracing:
        tracing.wrapped(source, model)
        tracker.see(list(data))
        listeners = _LedgerAndTracer(ledger, tracing, device)
        yield listeners
        tracing.stepped(source)
    # The buckets of DDP and the workspaces of products lived before the step, though it first showed them.
    log.older_first()
    save(summary(log, str(device), step, listeners.most))


def summary(log: EventLog, device: str, step: int, most: int | None = None) -> dict[str, Any]:
    """The traced step as a JSON object (docs/memory.md).

    `most`: the allocator's peak in the step; bytes beyond the tracer's peak are unattributed.
    """
    # The CUDA allocator rounds every block up to 512 bytes (kMinBlockSize); malloc's overhead on CPUs is not counted.
    rounding = 512 if device.startswith("cuda") else 1
    peaks = log.peaks(device, rounding)
    peak = max(peaks.values(), key=lambda candidate: candidate.n_bytes)
    unknown = max(0, 0 if most is None else most - peak.n_bytes)
    points, stack = _timeline(log, device, rounding)
    by_phase: dict[str, Peak] = {}
    for candidate in peaks.values():
        if candidate.phase not in by_phase or candidate.n_bytes > by_phase[candidate.phase].n_bytes:
            by_phase[candidate.phase] = candidate
    return {
        "schema": SCHEMA,
        "step": step,
        "device": device,
        "unit": "bytes",
        "peak": _peak(peak, unknown),
        "phases": {
            phase: _peak(candidate, unknown) for phase, candidate in by_phase.items() if phase not in ("start", "wrap")
        },
        "timeline": points,
        "stack": stack,
        "bands": _bands(log),
        "largest": _largest(log, device, peak.at),
    }


def _peak(peak: Peak, unknown: int) -> dict[str, Any]:
    categories = {category: peak.categories[category] for category in CATEGORIES if peak.categories.get(category)}
    if unknown:
        categories["unattributed"] = unknown
    return {
        "bytes": peak.n_bytes + unknown, "phase": peak.phase, "module": peak.module, "categories": categories
    }  # fmt: skip


def _timeline(log: EventLog, device: str, rounding: int) -> tuple[list[list[int]], dict[str, list[int]]]:
    """About `POINTS` moments as [event, bytes], each the highest of a stretch of events; and bytes by category."""
    stretch = max(1, len(log.events) // POINTS)
    points: list[list[int]] = []
    stack: dict[str, list[int]] = {category: [] for category in CATEGORIES}
    sums: Counter[Category] = Counter()
    sizes: dict[int, int] = {}
    total, best, at_best, then = 0, -1, 0, Counter[Category]()
    for at, (index, change) in enumerate(log.events):
        allocation = log.allocations[index]
        if allocation.device == device:
            size = sizes.get(index, 0)
            sizes[index] = size + change
            change = -(-(size + change) // rounding) * rounding + size // -rounding * rounding
            total += change
            sums[allocation.category] += change
        if total > best:
            best, at_best, then = total, at, sums.copy()
        if (at + 1) % stretch == 0 or at + 1 == len(log.events):
            points.append([at_best, best])
            for category in CATEGORIES:
                stack[category].append(then[category])
            best = -1
    return points, {category: values for category, values in stack.items() if any(values)}


def _bands(log: EventLog) -> list[dict[str, Any]]:
    """The range of events in which each part of the model ran; parts are blocks and top-level modules."""
    bands: list[dict[str, Any]] = []
    ends = [mark[0] for mark in log.marks[1:]] + [len(log.events)]
    for (begin, phase, module), end in zip(log.marks, ends, strict=True):
        part = _part(module)
        if bands and (bands[-1]["module"], bands[-1]["phase"]) == (part, phase):
            bands[-1]["end"] = end
        elif end > begin and phase in ("forward", "backward", "update"):
            bands.append({"module": part, "phase": phase, "begin": begin, "end": end})
    return bands


def _part(module: str) -> str:
    """`blocks.3.attn.qkv` → `blocks.3`; `head` stays."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", module)
    return match[0] if match else module.split(".")[0]


def _largest(log: EventLog, device: str, at: int) -> list[dict[str, Any]]:
    """The largest storages at an event, with their origin."""
    live = sorted(log.live(device, at).items(), key=lambda item: -item[1])[:LARGEST]
    entries = []
    for index, n_bytes in live:
        made = log.allocations[index]
        entries.append({
            "bytes": n_bytes, "category": made.category, "phase": made.phase, "module": made.module, "op": made.op,
            "shape": None if made.shape is None else list(made.shape),
        })  # fmt: skip
    return entries
