"""A tracker's log of allocations, each with its operator, phase and module, and the composition of peaks."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..rows import KINDS, Category
from .compat import tensors

_ORDER: dict[str, int] = {kind: order for order, kind in enumerate(KINDS)}
_COLLECTIVES = ("c10d", "fsdp::", "_c10d_functional")


class Allocation:
    """One storage from when it was first seen: its origin, and the labels it gets later.

    `op`: the operator that returned it ("" for a storage that was not made by a traced operator). `phase, module`: the
    phase and the module that ran when it was made. `recorded`: made while autograd was recording: in forward, or in a
    recomputation during backward. `is_older`: the operator that showed it did not make it: it returned a view, wrote to
    it, or used it.
    """

    __slots__ = (
        "consumed", "device", "is_older", "label", "module", "n_bytes", "op", "phase", "recorded", "shape", "stream"
    )  # fmt: skip

    def __init__(self, device: str, op: str, phase: str, module: str, recorded: bool, stream: int) -> None:
        self.device, self.op, self.phase, self.module = device, op, phase, module
        self.recorded, self.stream = recorded, stream
        # released while autograd was not recording, as backward releases saved tensors
        self.consumed = self.is_older = False
        self.label: str | None = None  # a category given by the code that made it; overrides the derived category
        self.shape: tuple[int, ...] | None = None
        self.n_bytes = 0

    @property
    def category(self) -> Category:
        """The label if there is one, else derived from the storage's life.

        Results of collectives are communication, results of forward that backward releases are activations, the rest is
        workspace.
        """
        if self.label is not None:
            return self.label  # type: ignore[return-value]
        if self.op.startswith(_COLLECTIVES):
            return "communication"
        return "activations" if self.recorded and self.consumed else "workspace"


@dataclass(frozen=True)
class Peak:
    """A moment at which a sum of live bytes was largest.

    `phase, module`: the phase and the module that ran then.
    """

    n_bytes: int  # the sum
    at: int  # index of the event that reached it
    phase: str
    module: str
    categories: Mapping[Category, int]  # bytes by category; they add up to `n_bytes`


@dataclass
class EventLog:
    """Every change of a storage's size, in order."""

    allocations: list[Allocation] = field(default_factory=list)
    # (index into `allocations`, bytes added); negative if a storage shrank or was freed
    events: list[tuple[int, int]] = field(default_factory=list)
    # (index of the first event, phase, module) for each change of phase or module
    marks: list[tuple[int, str, str]] = field(default_factory=lambda: [(0, "start", "")])
    # for each time that the program emptied the allocator's cache, the index of the next event
    releases: list[int] = field(default_factory=list)
    stream: Callable[[], int] = lambda: 0  # returns the stream of a new allocation; on CPU there is one
    phase: str = "start"
    module: str = ""
    # bytes that a library keeps from the first matrix product of each thread on: of the program's, and of autograd's
    # for backward
    product_workspace: int = 0
    _multiplied: set[bool] = field(default_factory=set)

    def made(self, device: str, op: str) -> int:
        """Log a new storage of 0 bytes; returns its index."""
        recorded = torch.is_grad_enabled() and self.phase != "start"
        self.allocations.append(Allocation(device, op, self.phase, self.module, recorded, self.stream()))
        return len(self.allocations) - 1

    def changed(self, index: int, n_bytes: int) -> None:
        """Log that a storage grew (or shrank) by `n_bytes`."""
        allocation = self.allocations[index]
        self.events.append((index, n_bytes))
        if n_bytes > 0:
            allocation.n_bytes = max(allocation.n_bytes, n_bytes)
        else:
            allocation.consumed = not torch.is_grad_enabled()

    def labelled(self, index: int, label: str) -> None:
        """Label a storage; of two labels the first in the order of `KINDS` wins."""
        allocation = self.allocations[index]
        old, new = _ORDER.get(allocation.label or "", len(_ORDER)), _ORDER.get(label, len(_ORDER))
        if allocation.label is None or new < old:
            allocation.label = label

    def scratch(self, device: str, op: str, n_bytes: int) -> None:
        """Log memory that a kernel allocates and frees inside an operator."""
        index = self.made(device, op)
        self.allocations[index].label = "workspace"
        self.changed(index, n_bytes)
        self.changed(index, -n_bytes)

    def multiplied(self, device: str, op: str) -> None:
        """Log a matrix product: the first in a thread takes a workspace and keeps it."""
        in_backward = self.phase == "backward"
        if self.product_workspace and in_backward not in self._multiplied:
            self._multiplied.add(in_backward)
            index = self.made(device, op)
            self.allocations[index].label, self.allocations[index].is_older = "workspace", True
            self.changed(index, self.product_workspace)

    def released(self) -> None:
        """Log that the program empties the allocator's cache."""
        self.releases.append(len(self.events))

    def accumulated_in_place(self) -> None:
        """Rewrite the sums of gradients in backward as autograd makes them without a dispatch mode.

        Autograd adds a tensor's second gradient into the memory of the first if nothing else refers to that; under a
        dispatch mode it allocates a third. See `can_accumulate_inplace` in torch's input_buffer.cpp.
        """
        memory_of: dict[int, int] = {}  # index of a sum → index of the gradient whose memory holds it
        new_events: list[tuple[int, int]] = []
        positions: list[int] = []  # for each old event: index of the first new event at or after it
        events, at = self.events, 0
        while at < len(events):
            positions.append(len(new_events))
            index, n_bytes = events[at]
            made = self.allocations[index]
            freed = []
            if n_bytes > 0 and made.op == "aten::add" and made.phase == "backward" and not made.recorded:
                # The sum's two addends die right behind it, unless something else still refers to one of them.
                for freed_index, change in events[at + 1 : at + 3]:
                    if change != -n_bytes or self.allocations[freed_index].device != made.device:
                        break
                    freed.append(freed_index)
            if freed:
                # Autograd adds into the gradient that it has held for longest.
                oldest = min(freed)
                memory_of[index] = memory_of.get(oldest, oldest)
                self.allocations[memory_of[index]].label = self.allocations[memory_of[index]].label or made.label
                frees = [
                    (memory_of.get(freed_index, freed_index), -n_bytes)
                    for freed_index in freed
                    if freed_index != oldest
                ]
                positions += [len(new_events)] * len(freed)
                new_events += frees
                at += 1 + len(freed)
                continue
            new_events.append((memory_of.get(index, index), n_bytes))
            at += 1
        positions.append(len(new_events))
        self.events[:] = new_events
        self.marks = [(positions[begin], phase, module) for begin, phase, module in self.marks]
        self.releases = [positions[at] for at in self.releases]

    def older_first(self) -> None:
        """Move gradients and workspaces that existed before the operator that showed them to the log's start.

        In all steps but the first ones these are DDP's buckets, which live as long as the wrapper and take the
        gradients in backward, and the workspaces of matrix products.
        """
        labels = ("grads", "workspace")
        older = {index for index, made in enumerate(self.allocations) if made.is_older and made.label in labels}
        early_events: list[tuple[int, int]] = []
        later_events: list[tuple[int, int]] = []
        moved: list[int] = []  # for each event: the number of earlier events that moved
        for index, n_bytes in self.events:
            moved.append(len(early_events))
            if index in older:
                older.remove(index)
                early_events.append((index, n_bytes))
            else:
                later_events.append((index, n_bytes))
        moved.append(len(early_events))
        self.events[:] = early_events + later_events
        self.marks = [
            (at + len(early_events) - moved[at] if at else 0, phase, module) for at, phase, module in self.marks
        ]
        self.releases = [at + len(early_events) - moved[at] for at in self.releases]

    def mark(self, phase: str | None = None, module: str | None = None) -> None:
        """Mark the phase and module that run from the next event on."""
        phase = self.phase if phase is None else phase
        module = self.module if module is None else module
        if (phase, module) != (self.phase, self.module):
            self.phase, self.module = phase, module
            self.marks.append((len(self.events), phase, module))

    def peaks(self, device: str, rounding: int = 1) -> dict[tuple[str, str], Peak]:
        """The largest total of a device while each (phase, module) ran; every storage rounded up to `rounding` bytes.

        A pair that runs without allocating gets the bytes live at its start.
        """
        best: dict[tuple[str, str], Peak] = {}
        sums: Counter[Category] = Counter()
        sizes: dict[int, int] = {}
        total = 0
        edges = [mark[0] for mark in self.marks[1:]] + [len(self.events)]
        for (begin, phase, module), end in zip(self.marks, edges, strict=True):
            most = best.get((phase, module))
            if most is None or total > most.n_bytes:
                most = Peak(total, max(begin - 1, 0), phase, module, dict(sums))
            for at in range(begin, end):
                index, change = self.events[at]
                allocation = self.allocations[index]
                if allocation.device != device:
                    continue
                size = sizes.get(index, 0)
                sizes[index] = size + change
                # The difference of both sizes rounded up: `-(-n // r) * r` rounds n up, `n // -r * r` is its negative.
                change = -(-(size + change) // rounding) * rounding + size // -rounding * rounding
                total += change
                sums[allocation.category] += change
                if total > most.n_bytes:
                    most = Peak(total, at, phase, module, dict(sums))
            best[phase, module] = most
        return best

    def peak(self, device: str, rounding: int = 1, phase: str | None = None) -> Peak:
        """The largest total of a device, overall or in one phase."""
        peaks = self.peaks(device, rounding).values()
        candidates = [peak for peak in peaks if phase is None or peak.phase == phase]
        return max(candidates, key=lambda peak: peak.n_bytes, default=Peak(0, 0, phase or "start", "", {}))

    def live(self, device: str, at: int) -> dict[int, int]:
        """Bytes of every live storage of a device just after an event, by index into `allocations`."""
        sizes: dict[int, int] = {}
        for index, change in self.events[: at + 1]:
            if self.allocations[index].device == device:
                sizes[index] = sizes.get(index, 0) + change
        return {index: n_bytes for index, n_bytes in sizes.items() if n_bytes}


@contextmanager
def following_modules(log: EventLog, model: nn.Module) -> Iterator[None]:
    """Log which module runs, forward and backward, by its name within `model`.

    A module's backward begins when the gradient of its output is ready. Names omit wrappers' prefixes.
    """
    wrappers = re.compile(r"(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
    names = {id(module): wrappers.sub("", name) for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: nn.Module, args: object) -> None:
        name = names.get(id(module))
        if name is not None:
            stack.append(name)
            log.mark(module=name)

    def leave(module: nn.Module, args: object, out: object) -> None:
        name = names.get(id(module))
        if name is None:
            return
        # A module whose forward raised never left the stack.
        while stack and stack.pop() != name:
            pass
        log.mark(module=stack[-1] if stack else "")
        for tensor in tensors(out):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _, name=name: log.mark(module=name))  # type: ignore[no-untyped-call]

    with ExitStack() as exits:
        for handle in (register_module_forward_pre_hook(enter), register_module_forward_hook(leave)):
            exits.callback(handle.remove)
        yield


def repeat_last_step(log: EventLog, end: str) -> bool:
    """Insert a copy of the last step before it, as if three steps had been traced; False if it does not repeat itself.

    A step repeats itself if every storage that it leaves behind takes the place of one that it frees, with the same
    size, device and stream, as gradients do. All others must be as large after the step as before it.

    `end`: the phase that is marked at the end of each step.
    """
    ends = [at for at, (_, phase, module) in enumerate(log.marks) if (phase, module) == (end, "")]
    if len(ends) < 2:
        return False
    begin, stop = log.marks[ends[-2]][0], log.marks[ends[-1]][0]
    before, step, after = log.events[:begin], log.events[begin:stop], log.events[stop:]
    n_older = max((index for index, _ in before), default=-1) + 1
    successors = _successors(log, before, step, n_older)
    if successors is None:
        return False
    copies: dict[int, int] = {}
    for index, _ in step:
        if index >= n_older and index not in copies:
            copies[index] = len(log.allocations)
            log.allocations.append(copy(log.allocations[index]))
    replaced = {older: copies[index] for older, index in successors.items()}
    for older, copied_index in replaced.items():
        log.allocations[copied_index].consumed = log.allocations[older].consumed  # as the step frees both
    copied = [(copies.get(index, index), n_bytes) for index, n_bytes in step]
    log.events[:] = [*before, *copied, *((replaced.get(index, index), n_bytes) for index, n_bytes in step), *after]
    n_events, marks = len(step), log.marks[ends[-2] + 1 :]
    log.marks[ends[-1] + 1 :] = [(at + n_events, phase, module) for at, phase, module in marks]
    in_step = [at for at in log.releases if begin <= at < stop]
    log.releases[:] = [
        *(at for at in log.releases if at < stop),
        *(at + n_events for at in [*in_step, *(at for at in log.releases if at >= stop)]),
    ]
    return True


def _successors(
    log: EventLog, before: list[tuple[int, int]], step: list[tuple[int, int]], n_older: int
) -> dict[int, int] | None:
    """Each storage that the step frees → the one made in it that takes its place; `None` if they do not match."""
    sizes: dict[int, int] = defaultdict(int)
    for index, n_bytes in before:
        sizes[index] += n_bytes
    changes: dict[int, int] = defaultdict(int)
    for index, n_bytes in step:
        changes[index] += n_bytes
    freed: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    made: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for index in sorted(index for index, n_bytes in changes.items() if n_bytes):
        allocation, size = log.allocations[index], sizes[index] + changes[index]
        if index >= n_older:
            made[allocation.device, allocation.stream, size].append(index)
        elif size == 0:
            freed[allocation.device, allocation.stream, sizes[index]].append(index)
        else:
            return None
    if {key: len(indices) for key, indices in freed.items()} != {key: len(indices) for key, indices in made.items()}:
        return None
    return {older: newer for key, indices in freed.items() for older, newer in zip(indices, made[key], strict=True)}
