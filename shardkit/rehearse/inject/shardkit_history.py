"""What torch's own history of a rank's allocator tells: categories over time, the lines of the peak, and growth."""

from __future__ import annotations

import bisect
import itertools
import linecache
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

PARAMS, MASTER, GRADS, OPTIMIZER, BUFFERS = "params", "master_params", "grads", "optimizer", "buffers"
ACTIVATIONS, COMMUNICATION, WORKSPACE, UNATTRIBUTED = "activations", "communication", "workspace", "unattributed"
STATE = (PARAMS, MASTER, GRADS, OPTIMIZER, BUFFERS)
"""A block that holds several is of the first."""
CATEGORIES = (*STATE, ACTIVATIONS, COMMUNICATION, WORKSPACE, UNATTRIBUTED)
POINTS = 500
"""Of the curve over time: each has the largest total of its stretch of events."""
LARGEST = 12
"""Tensors of the peak that are listed one by one."""
BENEATH = (os.path.join("site-packages", "torch", ""), os.path.dirname(os.__file__) + "/", os.path.dirname(__file__))
"""Torch, Python and the rehearsal: a tensor's line is the innermost outside of them."""
_LIBRARIES = ("-packages/torch/", "-packages/deepspeed/")
_PYTHON = os.path.dirname(os.__file__) + "/"
_GATHERING = (
    "/torch/distributed/fsdp/", "/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_coll",
    "/torch/nn/parallel/distributed.py", "/deepspeed/runtime/zero/", "/deepspeed/comm/",
)  # fmt: skip
_RECOMPUTING = ("/torch/utils/checkpoint.py", "/deepspeed/runtime/activation_checkpointing/")


class PhaseStart(NamedTuple):
    time_us: int
    phase: str
    step: int


class Holding(NamedTuple):
    """Address → category of the tensors of the state at a time."""

    time_us: int
    addresses: Mapping[int, str]


class History:
    """An allocator's events, each allocation with its category; an allocation is known by its event's index.

    State is what the program held at the ends of its phases: parameters, gradients, optimizer states, buffers. What was
    made in a forward and outlived it is kept for backward: activations; so is what a backward computes again. The rest
    is told by the code that made it.
    """

    def __init__(
        self, events: Sequence[Mapping[str, Any]], moments: Sequence[PhaseStart], holdings: Sequence[Holding]
    ) -> None:
        self.events, self.moments = events, moments
        self.moment_of: list[int] = []
        self._live: dict[int, int] = {}
        self._labels: dict[int, str] = {}
        current, remaining = 0, list(holdings)
        for index, event in enumerate(events):
            while remaining and remaining[0].time_us <= event["time_us"]:
                self._label(remaining.pop(0).addresses)
            while current + 1 < len(moments) and moments[current + 1].time_us <= event["time_us"]:
                self._end_phase(current)
                current += 1
            self.moment_of.append(current)
            self._step(self._live, index)
        for holding in remaining:
            self._label(holding.addresses)
        self._end_phase(current)  # of a forward that ran out of memory
        made = (index for index, event in enumerate(events) if event["action"] == "alloc")
        self.categories = {index: self._category(index) for index in made}

    def _step(self, live: dict[int, int], index: int) -> int:
        """Let an event change which allocations are there; returns the allocation that it ended, or -1."""
        event = self.events[index]
        if event["action"] == "alloc":
            live[event["addr"]] = index
        elif event["action"] == "free_requested":
            return live.pop(event["addr"], -1)
        return -1

    def _label(self, addresses: Mapping[int, str]) -> None:
        starts = sorted(self._live)
        for address, category in addresses.items():
            start = starts[max(bisect.bisect_right(starts, address) - 1, 0)] if starts else address + 1
            index = self._live.get(start, -1)
            if index < 0 or not start <= address < start + max(self.events[index]["size"], 1):
                continue
            label = self._labels.get(index)
            if label not in STATE or STATE.index(category) < STATE.index(label):
                self._labels[index] = category

    def _end_phase(self, moment: int) -> None:
        """What a forward made and left behind is kept for backward."""
        if self.moments[moment].phase == "forward":
            for index in self._live.values():
                if self.moment_of[index] == moment:
                    self._labels.setdefault(index, ACTIVATIONS)

    def _category(self, index: int) -> str:
        label = self._labels.get(index)
        if label in STATE:
            return str(label)
        frames, phase = self.events[index].get("frames", ()), self.phase_of(index)
        if any(part in filename for filename in _makers(frames) for part in _GATHERING):
            return COMMUNICATION
        if phase == "backward" and any(part in frame["filename"] for frame in frames for part in _RECOMPUTING):
            return ACTIVATIONS
        if label is not None:
            return label
        return UNATTRIBUTED if phase == "building" else WORKSPACE

    def phase_of(self, index: int) -> str:
        return self.moments[self.moment_of[index]].phase if self.moments else "building"

    def totals(self) -> list[int]:
        """Bytes allocated after each event."""
        return list(itertools.accumulate(size for _, size in self._changes()))

    def _changes(self) -> Iterator[tuple[str, int]]:
        """Category and bytes, less than 0 for a free, of each event."""
        live: dict[int, int] = {}
        for index, event in enumerate(self.events):
            ended = self._step(live, index)
            if event["action"] == "alloc":
                yield self.categories[index], event["size"]
            else:
                yield (UNATTRIBUTED, 0) if ended < 0 else (self.categories[ended], -self.events[ended]["size"])

    def trace(self) -> dict[str, Any]:
        """The curve by category and the peaks, in the form that `shardkit report` draws."""
        totals = self.totals()
        if not totals:
            return {}
        width = max(1, -(-len(totals) // POINTS))
        stretches = [range(start, min(start + width, len(totals))) for start in range(0, len(totals), width)]
        points = [max(stretch, key=totals.__getitem__) for stretch in stretches]
        by_phase: dict[str, int] = {}
        for index, total in enumerate(totals):
            phase = self.phase_of(index)
            if phase not in by_phase or total > totals[by_phase[phase]]:
                by_phase[phase] = index
        peak = max(by_phase.values(), key=totals.__getitem__)
        sums = self._sums_at({*points, *by_phase.values()})

        def shown(index: int) -> dict[str, Any]:
            moment = self.moments[self.moment_of[index]]
            return {"bytes": totals[index], "categories": sums[index], "phase": moment.phase, "step": moment.step}

        return {
            "step": shown(peak)["step"], "peak": shown(peak),
            "phases": {phase: shown(index) for phase, index in by_phase.items()},
            "timeline": [[index, totals[index]] for index in points],
            "stack": {category: [sums[index][category] for index in points] for category in CATEGORIES},
            "bands": self._bands(), "largest": self._largest(peak),
        }  # fmt: skip

    def _sums_at(self, indices: set[int]) -> dict[int, dict[str, int]]:
        """Bytes by category after each of these events."""
        sums, snapshots = dict.fromkeys(CATEGORIES, 0), {}
        for index, (category, size) in enumerate(self._changes()):
            sums[category] += size
            if index in indices:
                snapshots[index] = dict(sums)
        return snapshots

    def _bands(self) -> list[dict[str, Any]]:
        bands = []
        for moment, indices in itertools.groupby(range(len(self.events)), key=self.moment_of.__getitem__):
            stretch = list(indices)
            phase, step = self.moments[moment].phase, self.moments[moment].step
            name = phase if phase == "building" else f"{phase} of step {step}"
            bands.append({"begin": stretch[0], "end": stretch[-1] + 1, "module": name, "phase": phase})
        return bands

    def _largest(self, until: int) -> list[dict[str, Any]]:
        """The largest tensors after an event, with the line that made each."""
        live: dict[int, int] = {}
        for index in range(until + 1):
            self._step(live, index)
        indices = sorted(live.values(), key=lambda index: -int(self.events[index]["size"]))[:LARGEST]
        return [
            {
                "bytes": self.events[index]["size"], "category": self.categories[index],
                "phase": self.phase_of(index), "op": _program_line(self.events[index].get("frames", ())),
            }
            for index in indices
        ]  # fmt: skip

    def steps(self) -> list[dict[str, Any]]:
        """For each phase of each step: bytes at its end and at its peak, allocated and reserved."""
        signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
        added = (signs.get(event["action"], 0) * int(event["size"]) for event in self.events)
        reserved = itertools.accumulate(added)  # bytes that the allocator holds of the GPU
        rows: list[dict[str, Any]] = []
        pairs = zip(self.moment_of, self.totals(), reserved, strict=True)
        for moment, sizes in itertools.groupby(pairs, key=lambda entry: entry[0]):
            stretch = [(allocated, cached) for _, allocated, cached in sizes]
            rows.append({
                "phase": self.moments[moment].phase, "step": self.moments[moment].step,
                "allocated": stretch[-1][0], "peak_allocated": max(allocated for allocated, _ in stretch),
                "reserved": stretch[-1][1], "peak_reserved": max(cached for _, cached in stretch),
            })  # fmt: skip
        return rows


def _program_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line of a stack outside of torch and Python; stacks begin with the innermost."""
    outside = (frame for frame in frames if not any(part in frame["filename"] for part in BENEATH))
    return next((f"{frame['filename']}:{frame['line']}" for frame in outside), "")


def _makers(frames: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Files of a stack from the innermost outward: those of torch and DeepSpeed, up to the first that computes.

    An operator on a tensor that a collective still writes passes through the file of the collectives, and makes none.
    """
    for frame in frames:
        filename = str(frame["filename"])
        if frame["name"] == "__torch_dispatch__":
            continue
        if filename.startswith(_PYTHON) and "-packages/" not in filename:
            continue
        if "/torch/nn/modules/" in filename or not any(part in filename for part in _LIBRARIES):
            return
        yield filename


MOST_EVENTS = 200_000
"""Events that the history holds, of a KiB or so each; a rank with more has no lines."""
LINES = 8
"""Lines that are recorded, those with most bytes."""


def record_history(torch: Any) -> None:
    """Let torch's allocator remember its events, from the moment in which the process first uses CUDA.

    A recording of the program's own would take this one's place; its snapshots are of this one.
    """
    record = torch.cuda.memory._record_memory_history

    def begin() -> None:
        record("all", context="alloc", stacks="python", max_entries=MOST_EVENTS)

    def leave_as_it_is(*_: Any, **__: Any) -> None:
        pass

    leave_as_it_is.record = record  # type: ignore[attr-defined]
    torch.cuda.memory._record_memory_history = leave_as_it_is
    torch.cuda._lazy_call(begin)


def histories(torch: Any) -> dict[str, list[dict[str, Any]]]:
    """Device → the events of its allocator."""
    traces = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history.record(None)
    return {str(device): events for device, events in enumerate(traces) if events}


def is_whole(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a history has the first events, too: when it is full, each event takes the place of the oldest."""
    return len(events) < MOST_EVENTS


def at_peak(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The allocations of an allocator's history that were there when most was allocated."""
    allocations: dict[int, Mapping[str, Any]] = {}
    allocated = most = until = 0
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            allocations[event["addr"]] = event
            allocated += event["size"]
            if allocated > most:
                most, until = allocated, index + 1
        elif event["action"] == "free_requested" and allocations.pop(event["addr"], None) is not None:
            allocated -= event["size"]
    allocations.clear()
    for event in events[:until]:
        if event["action"] == "alloc":
            allocations[event["addr"]] = event
        elif event["action"] == "free_requested":
            allocations.pop(event["addr"], None)
    return list(allocations.values())


def by_line(allocations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bytes and number of allocations of each line, those with most bytes first."""
    n_bytes, numbers = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for allocation in allocations:
        line = line_of(allocation.get("frames", ()))
        n_bytes[line] += allocation["size"]
        numbers[line] += 1
    rows = []
    for (filename, number), size in n_bytes.most_common(LINES):
        rows.append({
            "source_line": source_line(filename, number), "n_bytes": size, "tensors": numbers[filename, number],
        })  # fmt: skip
    return rows


def source_line(filename: str, number: int) -> str:
    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}: {text}" if filename else "backward, or another thread without Python"


def line_of(frames: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """File and number of a stack's line, innermost first: the program's, else the innermost; ("", 0) without one."""
    for frame in frames:
        if not any(part in frame["filename"] for part in BENEATH):
            return frame["filename"], frame["line"]
    return (frames[0]["filename"], frames[0]["line"]) if frames else ("", 0)


STEPS = 9
"""Steps after which growth shows. A program whose memory rose is rehearsed for so many."""
RECENT = 2
"""Last steps that do not count: their tensors may still be in use, as a prefetched batch or the last loss is."""
COUNTED = 4
"""Steps before those, each of which must have left something behind."""
SMALLEST = 0.002
"""The part of the peak that a step must leave behind to be told: lists of losses grow, too, and fill no card."""


def is_likely(over_time: Sequence[Mapping[str, Any]]) -> bool:
    """Whether more steps are worth their time: some step ended with more memory than the one before."""
    sizes = [sample["allocated"] for sample in over_time]
    return any(after > before + SMALLEST * max(sizes) for before, after in itertools.pairwise(sizes))


def growth(events: Sequence[Mapping[str, Any]], ends_us: Sequence[int], peak: int) -> dict[str, Any]:
    """Bytes that each step leaves behind, and the line that made most of them; empty where memory does not grow.

    A step's tensors are gone when the next one has ended. What is made once (optimizer states, caches, the first batch
    of a prefetcher) was born in an early step. So a list that grows leaves tensors of each of the last steps behind. A
    tensor that is replaced by a longer one leaves none; its line holds more at the end of each step, and no other line
    makes as much more.
    """
    if len(ends_us) < COUNTED + RECENT + 1:
        return {}
    alive: dict[int, Mapping[str, Any]] = {}
    held: list[Counter[tuple[str, int]]] = []  # by line, at the end of each step
    made: list[Counter[tuple[str, int]]] = []  # in each step
    flow = Counter[tuple[str, int]]()
    for event in [*events, {"action": "end", "time_us": ends_us[-1] + 1}]:
        while len(held) < len(ends_us) and event["time_us"] > ends_us[len(held)]:
            lines = Counter[tuple[str, int]]()
            for allocation in alive.values():
                lines[line_of(allocation["frames"])] += allocation["size"]
            held.append(lines)
            made.append(flow)
            flow = Counter()
        if len(held) == len(ends_us):
            break
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            flow[line_of(event["frames"])] += event["size"]
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    return _left_behind(alive.values(), ends_us, peak) or _replaced(held, made, peak)


def _left_behind(alive: Any, ends_us: Sequence[int], peak: int) -> dict[str, Any]:
    """Growth of lists: lines of which tensors of each counted step outlived it."""
    last = len(ends_us) - RECENT
    left = {step: Counter[tuple[str, int]]() for step in range(last - COUNTED, last)}
    for event in alive:
        step = bisect.bisect_left(ends_us, event["time_us"])
        if step in left:
            left[step][line_of(event["frames"])] += event["size"]
    always = set.intersection(*map(set, left.values()))  # a cache that was filled in one of them grew once
    sizes = [sum(lines[line] for line in always) for lines in left.values()]
    if min(sizes) <= SMALLEST * peak:
        return {}
    most = max(always, key=lambda line: sum(lines[line] for lines in left.values()))
    return {
        "bytes_a_step": sum(sizes) // len(sizes), "first_step": last - COUNTED + 1, "last_step": last,
        "source_line": source_line(*most),
    }  # fmt: skip


def _replaced(
    held: Sequence[Counter[tuple[str, int]]], made: Sequence[Counter[tuple[str, int]]], peak: int
) -> dict[str, Any]:
    """Growth of one tensor: its line holds more at the end of every counted step.

    A batch that gets longer with every step does so as well; there other lines make as much more.
    """
    first = len(held) - COUNTED - 1
    for line, _ in held[-1].most_common():
        sizes = [lines[line] for lines in held[first:]]
        if not all(after > before + SMALLEST * peak for before, after in itertools.pairwise(sizes)):
            continue
        flows = ([flow[other] for flow in made[first:]] for other in made[-1] if other != line)
        rising = (flow[-1] / flow[0] for flow in flows if flow[0] and all(a < b for a, b in itertools.pairwise(flow)))
        if sizes[-1] > 1.05 * sizes[0] * max(rising, default=1.0):
            return {
                "bytes_a_step": (sizes[-1] - sizes[0]) // COUNTED, "first_step": first + 2, "last_step": len(held),
                "source_line": source_line(*line),
            }  # fmt: skip
    return {}
