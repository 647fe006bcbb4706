"""A rank's memory by category over time: its allocator's history, joined with the tensors that the program held.

State is what the program held at the ends of its phases: parameters, gradients, optimizer states, buffers. What was
made in a forward and outlived it is kept for backward: activations; so is what a backward computes again. The rest is
told by the code that made it.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
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
    """When a phase began."""

    time_us: int
    phase: str
    step: int


class Holding(NamedTuple):
    """Address → category of the tensors of the state at a time."""

    time_us: int
    addresses: Mapping[int, str]


class History:
    """An allocator's events, each allocation with its category; an allocation is known by its event's index.

    `events`: of `torch.cuda.memory._snapshot()["device_traces"]`. `moments`: beginnings of phases, in order.
    `holdings`: of the state, in order.
    """

    def __init__(
        self, events: Sequence[Mapping[str, Any]], moments: Sequence[PhaseStart], holdings: Sequence[Holding]
    ) -> None:
        self.events, self.moments = events, moments
        self.moment_of: list[int] = []
        self._live: dict[int, int] = {}
        self._labels: dict[int, str] = {}
        self._walk(list(holdings))
        self.categories = {index: self._category(index) for index, event in enumerate(events) if _is_made(event)}

    def _walk(self, holdings: list[Holding]) -> None:
        current = 0
        for index, event in enumerate(self.events):
            while holdings and holdings[0].time_us <= event["time_us"]:
                self._label(holdings.pop(0).addresses)
            while current + 1 < len(self.moments) and self.moments[current + 1].time_us <= event["time_us"]:
                self._end_phase(current)
                current += 1
            self.moment_of.append(current)
            self._step(self._live, index)
        for holding in holdings:
            self._label(holding.addresses)
        self._end_phase(current)  # of a forward that ran out of memory

    def _step(self, live: dict[int, int], index: int) -> int:
        """Let an event change which allocations are there; returns the allocation that it ended, or -1."""
        event = self.events[index]
        if _is_made(event):
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
            if _is_made(event):
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
        """The phases as stretches of events."""
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
                "phase": self.phase_of(index), "op": source_line(self.events[index].get("frames", ())),
            }
            for index in indices
        ]  # fmt: skip

    def steps(self) -> list[dict[str, Any]]:
        """For each phase of each step: bytes at its end and at its peak, allocated and reserved."""
        reserved = itertools.accumulate(_reserved(event) for event in self.events)
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


def source_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line of a stack outside of torch and Python; stacks begin with the innermost."""
    for frame in frames:
        if not any(part in frame["filename"] for part in BENEATH):
            return f"{frame['filename']}:{frame['line']}"
    return ""


def _is_made(event: Mapping[str, Any]) -> bool:
    return bool(event["action"] == "alloc")


def _reserved(event: Mapping[str, Any]) -> int:
    """Bytes that an event adds to what the allocator holds of the GPU."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    return signs.get(event["action"], 0) * int(event["size"])


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
