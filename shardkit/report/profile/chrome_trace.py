"""Operators and allocations of a Chrome trace from torch's profiler. Imports no torch."""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHASES = ("forward", "backward", "optimizer")
RANGES = {f"## {phase} ##": phase for phase in PHASES}
"""Name of the range around a phase → the phase."""
OUTSIDE = "outside"
"""The phase of everything else: loading data, reducing the loss, evaluating, saving."""
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # c10::DeviceType
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ALLOCATORS = ("aten::empty", "aten::new_empty", "aten::resize_")
"""Operators that only allocate memory for their caller, including variants (`aten::empty_like`)."""


Range = tuple[float, float, str]
"""Start, end, phase."""


@dataclass(eq=False)
class Op:
    """One call of an operator, or of a range or Python function around operators; times in µs.

    Attributes:
        recorded: autograd made a node for it: it is part of a forward computation, even one that backward recomputes.
        device_us: time of the kernels and copies that it launched itself.
    """

    name: str
    category: str
    start: float
    end: float
    phase: str
    parent: Op | None
    recorded: bool
    self_us: float
    device_us: float = 0.0

    def chain(self) -> Iterator[Op]:
        """This call, its caller, and so on outwards."""
        op: Op | None = self
        while op is not None:
            yield op
            op = op.parent


@dataclass(eq=False)
class ProfiledAllocation:
    """One block of memory; `end` is infinite if it was not freed before the trace ended.

    Attributes:
        caller: the innermost call around the allocation; `None` if there is none.
    """

    address: int
    n_bytes: int
    start: float
    end: float
    phase: str
    caller: Op | None

    @property
    def op(self) -> str:
        """The innermost operator that does more than allocate memory."""
        calls = [op.name for op in self.caller.chain() if op.name not in RANGES and _is_op(op)] if self.caller else []
        return next(
            (name for name in calls if not name.startswith(_ALLOCATORS)), calls[0] if calls else "(no operator)"
        )

    @property
    def source_line(self) -> str | None:
        """The innermost line outside torch, where the trace has Python frames."""
        frames = [op.name for op in self.caller.chain() if op.category == "python_function"] if self.caller else []
        return next((f for f in frames if ".py(" in f and not f.startswith("torch/") and "/torch/" not in f), None)


@dataclass
class Trace:
    """One rank's trace of one device, in order of time.

    Attributes:
        ranges: each run of a phase.
        freed_before: (time, address, bytes) of blocks that were freed during the trace but allocated before it.
    """

    ranges: list[Range]
    ops: list[Op]
    allocations: list[ProfiledAllocation]
    freed_before: list[tuple[float, int, int]] = field(default_factory=list)

    def runs(self, phase: str) -> list[Range]:
        """The runs of one phase."""
        return [run for run in self.ranges if run[2] == phase]

    def phase_at(self, time: float) -> str:
        return _phase_at(time, self.ranges)

    def end_of_run(self, time: float) -> float:
        """When the phase that was running at `time` ended; `time` itself if none was."""
        index = bisect_right(self.ranges, time, key=lambda item: item[0]) - 1
        return max(time, self.ranges[index][1]) if index >= 0 else time


def read_trace(path: Path, device: str) -> Trace:
    """Read a trace written with `profile_memory=True`.

    Args:
        device: `cpu` or `cuda`: count this device's allocations.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return parse(json.load(file)["traceEvents"], device)


def parse(events: Iterable[Mapping[str, Any]], device: str) -> Trace:
    """Nest the calls, match each allocation with its release, and sum up kernels by the call that launched them."""
    threads: defaultdict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    memory, launched = [], defaultdict[Any, float](float)
    for event in events:
        category = event.get("cat")
        if category in _ON_DEVICE:
            launched[event["args"].get("External id")] += event["dur"]
        elif event.get("name") == "[memory]":
            if event["args"]["Device Type"] == _DEVICE_TYPES[device]:
                memory.append(event)
                threads[event["tid"]].append(event)
        elif category in ("cpu_op", "user_annotation", "python_function") and event.get("ph") == "X":
            threads[event["tid"]].append(event)
    ranges = sorted(
        (e["ts"], e["ts"] + e["dur"], RANGES[e["name"]]) for t in threads.values() for e in t if e["name"] in RANGES
    )
    ops: list[Op] = []
    callers: dict[int, Op | None] = {}
    for thread in threads.values():
        _nest(thread, ranges, launched, ops, callers)
    memory.sort(key=lambda event: float(event["ts"]))
    allocations, freed_before = _match(memory, ranges, callers)
    return Trace(ranges, [op for op in ops if _is_op(op) and op.name not in RANGES], allocations, freed_before)


def _is_op(op: Op) -> bool:
    return op.category != "python_function"


def _phase_at(time: float, ranges: Sequence[Range]) -> str:
    index = bisect_right(ranges, time, key=lambda item: item[0]) - 1
    return ranges[index][2] if index >= 0 and time <= ranges[index][1] else OUTSIDE


def _nest(
    thread: list[Mapping[str, Any]],
    ranges: Sequence[Range],
    launched: Mapping[Any, float],
    ops: list[Op],
    callers: dict[int, Op | None],
) -> None:
    """Walk one thread in order of time; add its calls to `ops`, and each memory event's caller (by id) to `callers`."""
    thread.sort(key=lambda event: (event["ts"], -event.get("dur", -1.0)))
    inner: Op | None = None
    for event in thread:
        start = event["ts"]
        while inner is not None and inner.end < start:
            inner = inner.parent
        if event["name"] == "[memory]":
            callers[id(event)] = inner
            continue
        args, duration = event.get("args", {}), event["dur"]
        # A node's run in backward carries the number too, but also the thread of its forward.
        recorded = args.get("Sequence number", -1) >= 0 and not args.get("Fwd thread id")
        op = Op(
            event["name"], event["cat"], start, start + duration, _phase_at(start, ranges), inner, recorded, duration,
            launched.get(args.get("External id"), 0.0),
        )  # fmt: skip
        if _is_op(op):
            outer = next((o for o in inner.chain() if _is_op(o)), None) if inner is not None else None
            if outer is not None:
                outer.self_us -= duration
        ops.append(op)
        inner = op


def _match(
    memory: Sequence[Mapping[str, Any]], ranges: Sequence[Range], callers: Mapping[int, Op | None]
) -> tuple[list[ProfiledAllocation], list[tuple[float, int, int]]]:
    """Pair allocations with releases by address.

    A thread that the profiler does not follow (gloo's) may release a block unseen: the next allocation at the block's
    address then marks its end.
    """
    live: dict[int, ProfiledAllocation] = {}
    allocations, freed_before = [], []
    for event in memory:
        time, args = float(event["ts"]), event["args"]
        address, n_bytes = args["Addr"], args["Bytes"]
        earlier = live.pop(address, None)
        if earlier is not None:
            earlier.end = time
        if n_bytes > 0:
            made = ProfiledAllocation(address, n_bytes, time, math.inf, _phase_at(time, ranges), callers[id(event)])
            allocations.append(made)
            live[address] = made
        elif earlier is None:
            freed_before.append((time, address, -n_bytes))
    return allocations, freed_before
