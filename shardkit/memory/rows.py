"""One row of memory figures per rank, its form as JSON in `memory.jsonl`, and all ranks in a few numbers.

The JSON is described in docs/memory.md; `SCHEMA` grows when a field changes its meaning or is removed, not when one is
added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from ..errors import gib

SCHEMA = 2
READABLE = (1, 2)
"""Schema 1 calls the phase `update` `step`."""
PhaseName = Literal["init", "wrap", "forward", "backward", "update"]
StateKind = Literal["params", "quantized", "master_params", "grads", "optimizer", "buffers"]
Category = Literal[
    "params", "quantized", "master_params", "grads", "optimizer", "activations", "buffers", "communication",
    "workspace", "unattributed",
]  # fmt: skip
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
KINDS: tuple[StateKind, ...] = get_args(StateKind)
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one category on the training device and, when that is not the CPU, on the host."""

    device: int
    host: int

    @property
    def total(self) -> int:
        return self.device + self.host


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes when a phase ended, and its peaks: the largest over all its runs since the previous gather."""

    allocated: int | None
    peak_allocated: int | None
    reserved: int | None
    peak_reserved: int | None
    rss: int
    peak_rss: int


@dataclass(frozen=True)
class HostMemory:
    """Host memory of the rank's process, in bytes."""

    rss: int  # resident now; `peak_rss`: the most so far
    peak_rss: int
    uss: int | None  # resident and shared with no other process
    children_rss: int | None  # resident in its descendants
    limit: int  # the most it may use
    staging: int = 0  # kept by background saves for their copy of the state, a part of `rss`
    # held by all processes under `limit` together, without memory that the kernel can reclaim
    in_use: int | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """The device's caching allocator, in bytes; peaks since the ledger was created. A row on CPU has none."""

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    total: int  # the device's memory
    # held by all processes on the device together: `reserved`, contexts, and other processes' memory
    in_use: int | None = None
    growth: int | None = None  # that each of the last steps left behind (growth.py); None if memory does not grow
    growth_line: str | None = None  # `FILE:NUMBER: TEXT` that made most of it; looked for once, in the steps after

    @property
    def full_in(self) -> int:
        """Steps until memory that grows has filled the device."""
        return max(0, self.total - (self.in_use or self.reserved)) // self.growth if self.growth else 0


@dataclass(frozen=True)
class Identity:
    """The facts of a rank that do not change during a run."""

    rank: int
    host: str
    local_rank: int
    device: str

    @property
    def name(self) -> str:
        """`rank@host`, as messages name a rank."""
        return f"{self.rank}@{self.host}"


@dataclass(frozen=True)
class RankRow:
    """One rank at one gather; times are means over the steps since the last one."""

    identity: Identity
    step_time_s: float | None
    data_wait_s: float | None
    # time in forward and waiting for data, without waiting for other ranks: the rank's own work; a whole step includes
    # waiting for others
    busy_s: float | None
    host_mem: HostMemory
    device_mem: DeviceMemory | None
    state: Mapping[StateKind, StateBytes] | None
    phases: Mapping[PhaseName, PhaseMemory]
    alloc_retries: int | None
    ooms: int | None
    overhead_s: float

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def state_on_device(self) -> int | None:
        """Bytes of the state on the training device."""
        return None if self.state is None else sum(b.device for b in self.state.values())

    @property
    def unattributed(self) -> int | None:
        """Bytes of the device's allocated peak that are not state: activations, workspace and the like; None on CPU."""
        if self.device_mem is None or self.state_on_device is None:
            return None
        return max(0, self.device_mem.peak_allocated - self.state_on_device)

    def to_json(self) -> dict[str, Any]:
        # Not asdict: it copies deeply, which would slow the gather of a large world.
        row = {**vars(self.identity), **vars(self)}
        del row["identity"]
        row["host_mem"] = vars(self.host_mem)
        row["device_mem"] = None if self.device_mem is None else vars(self.device_mem)
        row["state"] = None if self.state is None else {kind: vars(n_bytes) for kind, n_bytes in self.state.items()}
        row["phases"] = {phase: vars(memory) for phase, memory in self.phases.items()}
        row["unattributed"] = self.unattributed
        return row

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> RankRow:
        """Inverse of `to_json`; a later version's fields are skipped, fields that an earlier one lacks get defaults."""
        phases = {phase_name(name): memory for name, memory in obj["phases"].items()}
        return _row_type().validate_python({**obj, "identity": obj, "phases": phases})


@cache
def _row_type() -> TypeAdapter[RankRow]:
    return TypeAdapter(RankRow)


def quantized_bytes(row: RankRow) -> int:
    """Bytes of a rank's quantised weights; rows of earlier versions have none."""
    return row.state["quantized"].total if row.state and "quantized" in row.state else 0


def phase_name(name: str) -> Any:
    """Today's name of a phase that an older file or an older loop may call by its former one."""
    return "update" if name == "step" else name


def gather_json(step: int, time: float, rows: Sequence[RankRow]) -> dict[str, Any]:
    """The object that one gather adds to `memory.jsonl`; `time` in seconds since the epoch."""
    return {"schema": SCHEMA, "step": step, "time": round(time, 3), "ranks": [row.to_json() for row in rows]}


SLOW = 1.2
"""A rank that is busy for more than this multiple of the median is called slow."""
NOTICEABLE = 0.1
"""... if the difference is more than this share of a step: the rest is noise."""
SHOWN_SINGLY = 16
"""Up to this many ranks, every one is shown; above that, only the `WORST` and the `BEST`."""
WORST, BEST = 8, 2

_METRICS: dict[str, Callable[[RankRow], float | None]] = {
    "peak_allocated": lambda row: None if row.device_mem is None else row.device_mem.peak_allocated,
    "peak_reserved": lambda row: None if row.device_mem is None else row.device_mem.peak_reserved,
    "peak_rss": lambda row: row.host_mem.peak_rss,
    "state": lambda row: None if row.state is None else sum(n_bytes.total for n_bytes in row.state.values()),
    "step_time_s": lambda row: row.step_time_s,
}


LABELS = {
    "peak_allocated": "peak allocated",
    "peak_reserved": "peak reserved",
    "peak_rss": "peak RSS",
    "state": "state",
    "step_time_s": "step time",
}
"""Metric → its name for people."""


@dataclass(frozen=True)
class Spread:
    """One figure over all ranks; `skew` = max / mean, `worst` = the rank with the largest, as `rank@host`."""

    max: float
    min: float
    mean: float
    skew: float
    worst: str


@dataclass(frozen=True)
class Straggler:
    """A rank that is busy for longer than `SLOW` × the median in a step; `ratio` = its time / median."""

    name: str
    busy_s: float
    ratio: float


@dataclass(frozen=True)
class Summary:
    """Spreads by metric (peak_allocated, peak_reserved, peak_rss, state, step_time_s; absent if no rank has it)."""

    spreads: Mapping[str, Spread]  # over all ranks
    stragglers: Sequence[Straggler]
    nodes: Mapping[str, Mapping[str, Spread]]  # over the ranks of each host, in the order of their first ranks

    @property
    def peak(self) -> tuple[str, Spread] | None:
        """The metric to compare ranks by, and its spread: peak allocated on a device, peak RSS on the CPU."""
        candidates = ((name, self.spreads[name]) for name in ("peak_allocated", "peak_rss") if name in self.spreads)
        return next(candidates, None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summary(rows: Sequence[RankRow]) -> Summary:
    """Condense one gather's rows."""
    hosts: dict[str, list[RankRow]] = {}
    for row in rows:
        hosts.setdefault(row.identity.host, []).append(row)
    return Summary(_spreads(rows), _stragglers(rows), {host: _spreads(host_rows) for host, host_rows in hosts.items()})


def pressure(row: RankRow) -> float:
    """The figure that ranks are ordered by: peak allocated on a device, peak RSS on the CPU."""
    return row.host_mem.peak_rss if row.device_mem is None else row.device_mem.peak_allocated


def growing(rows: Sequence[RankRow]) -> list[str]:
    """A sentence on the rank whose memory grows most; empty if none does."""
    rates = [
        (row.device_mem.growth, row.name, row.device_mem) for row in rows if row.device_mem and row.device_mem.growth
    ]
    if not rates:
        return []
    rate, name, memory = max(rates, key=lambda entry: entry[0])
    return [
        f"grows: rank {name} keeps {gib(rate)} more after each step and is full in {memory.full_in:,} steps; "
        + (f"made at {memory.growth_line}" if memory.growth_line else "shardkit rehearse names the line that makes it")
    ]


def _spreads(rows: Sequence[RankRow]) -> dict[str, Spread]:
    spreads = {}
    for name, metric in _METRICS.items():
        values = [(value, row.name) for row in rows if (value := metric(row)) is not None]
        if values:
            numbers = [number for number, _ in values]
            largest, worst = max(values, key=lambda pair: pair[0])
            mean = sum(numbers) / len(numbers)
            spreads[name] = Spread(largest, min(numbers), mean, largest / mean if mean else 1.0, worst)
    return spreads


def _stragglers(rows: Sequence[RankRow]) -> list[Straggler]:
    times = [(row.busy_s, row.name, row.step_time_s or row.busy_s) for row in rows if row.busy_s is not None]
    if not times:
        return []
    middle = median(seconds for seconds, _, _ in times)
    slow = [
        Straggler(name, seconds, seconds / middle)
        for seconds, name, step in times
        if seconds > SLOW * middle > 0 and seconds - middle > NOTICEABLE * step
    ]
    return sorted(slow, key=lambda straggler: -straggler.ratio)
