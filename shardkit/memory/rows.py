"""One row of memory figures per rank: its fields, and its form as JSON in `memory.jsonl`.

The JSON is described in docs/memory.md; `SCHEMA` grows when a field changes its meaning or is removed, not when one is
added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeVar, get_args

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
    """Host memory of the rank's process, in bytes.

    Attributes:
        rss: resident now; `peak_rss`: the most so far.
        uss: resident and shared with no other process.
        children_rss: resident in its descendants.
        limit: the most it may use.
        staging: kept by background saves for their copy of the state, a part of `rss`.
        in_use: held by all processes under `limit` together, without memory that the kernel can reclaim.
    """

    rss: int
    peak_rss: int
    uss: int | None
    children_rss: int | None
    limit: int
    staging: int = 0
    in_use: int | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """The device's caching allocator, in bytes; peaks since the ledger was created. A row on CPU has none.

    Attributes:
        total: the device's memory.
        in_use: held by all processes on the device together: `reserved`, contexts, and other processes' memory.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    total: int
    in_use: int | None = None


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
    """One rank at one gather; times are means over the steps since the last one.

    Attributes:
        busy_s: time in forward and waiting for data, without waiting for other ranks: the rank's own work; a whole step
            includes waiting for others.
    """

    identity: Identity
    step_time_s: float | None
    data_wait_s: float | None
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
    def state_total(self) -> int | None:
        """Bytes of all state, device and host."""
        return None if self.state is None else sum(b.total for b in self.state.values())

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
        """Inverse of `to_json`; a later version's fields are skipped, fields that an earlier one lacks get defaults.

        Raises:
            KeyError, TypeError, AttributeError: it is not such a row.
        """
        kinds = {field.name: str(field.type) for field in fields(cls)}
        return cls(
            identity=_pick(Identity, obj),
            host_mem=_pick(HostMemory, obj["host_mem"]),
            device_mem=None if obj["device_mem"] is None else _pick(DeviceMemory, obj["device_mem"]),
            state=None if obj["state"] is None else {k: _pick(StateBytes, v) for k, v in obj["state"].items()},
            phases={phase_name(k): _pick(PhaseMemory, v) for k, v in obj["phases"].items()},
            **{name: _checked(name, obj[name], kind) for name, kind in kinds.items() if kind in _ALLOWED},
        )


def quantized_bytes(row: RankRow) -> int:
    """Bytes of a rank's quantised weights; rows of earlier versions have none."""
    return row.state["quantized"].total if row.state and "quantized" in row.state else 0


def phase_name(name: str) -> Any:
    """Today's name of a phase that an older file or an older loop may call by its former one."""
    return "update" if name == "step" else name


def gather_json(step: int, time: float, rows: Sequence[RankRow]) -> dict[str, Any]:
    """The object that one gather adds to `memory.jsonl`; `time` in seconds since the epoch."""
    return {"schema": SCHEMA, "step": step, "time": round(time, 3), "ranks": [row.to_json() for row in rows]}


_T = TypeVar("_T", HostMemory, DeviceMemory, StateBytes, PhaseMemory, Identity)


def _pick(cls: type[_T], obj: Mapping[str, Any]) -> _T:
    present = (field for field in fields(cls) if field.name in obj or field.default is MISSING)
    return cls(**{field.name: _checked(field.name, obj[field.name], str(field.type)) for field in present})


_ALLOWED = {
    "str": (str,), "int": (int,), "int | None": (int, type(None)),
    "float": (int, float), "float | None": (int, float, type(None)),
}  # fmt: skip


def _checked(name: str, value: Any, kind: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, _ALLOWED[kind]):
        raise TypeError(f"{name} is not of type {kind}")
    return value
