"""The post-mortem of a rank that runs out of memory: written before it dies, for the launcher, the report and people.

`RUN_DIR/oom/rank{r}.json` is described in docs/memory.md; `SCHEMA` grows when a field changes its meaning or is
removed. Nothing here runs before a failure: the facts come from the exception, its traceback and the allocator.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ..config.schema import RunConfig
from ..errors import OutOfMemoryError, gib
from ..files import write_whole
from ..memory.ledger import MemoryLedger
from ..memory.probe import local_tensors, phase_of
from ..memory.rows import KINDS, RankRow, StateKind
from . import shortage as shortages
from .advice import candidates
from .shortage import Made, MemoryCap, Shortage, module_of, raised_at

# Find the tensors that hold the memory, by a walk over all objects: slow, so only after a failure.


@dataclass
class Live:
    """One storage that is alive."""

    n_bytes: int  # bytes of the whole storage, even if a tensor views only a part
    shape: tuple[int, ...] | None = None  # of the largest tensor on it; `None` for most of what autograd keeps
    dtype: str | None = None
    category: StateKind | None = None  # of the ledger's kinds of state; `None` for activations and the rest
    name: str | None = None  # `model.<fqn>`, `optim.<fqn>.<state>`, `buffer.<fqn>`: the first in a flat buffer
    made: str | None = None  # operator and line; known under a memory cap, or while the allocator keeps its history

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"bytes": fields.pop("n_bytes"), **fields}


def biggest(
    count: int,
    device: torch.device,
    state: Iterable[tuple[StateKind, torch.Tensor]] = (),  # (kind, tensor) pairs, as a strategy yields them
    shards: Iterable[Any] = (),  # shards of a checkpoint, whose `name` and `local` give state its names
    made: Iterable[Made] = (),  # storages that a memory cap recorded
    # address → (bytes, where it was made) of the CUDA allocator's blocks in use, from `snapshot_blocks`
    blocks: Mapping[int, tuple[int, str | None]] | None = None,
) -> list[Live]:
    storages: dict[int, Live] = {}
    # By type: `isinstance` would call proxies, which may do anything.
    for tensor in (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)):
        for local in _plain(tensor, device):
            storage = local.untyped_storage()
            live = storages.setdefault(storage.data_ptr(), Live(storage.nbytes()))
            if live.shape is None or local.numel() > torch.Size(live.shape).numel():
                live.shape, live.dtype = tuple(local.shape), str(local.dtype)
    for note in made:
        live = storages.setdefault(note.address, Live(note.n_bytes, note.shape, note.dtype))
        live.made = note.by
    for address, (n_bytes, frames) in (blocks or {}).items():
        live = storages.setdefault(address, Live(n_bytes))
        live.made = live.made or frames
    order = {kind: index for index, kind in enumerate(KINDS)}
    for kind, tensor in state:
        for local in _plain(tensor, device):
            live = storages.setdefault(local.untyped_storage().data_ptr(), Live(local.untyped_storage().nbytes()))
            if live.category is None or order[kind] < order[live.category]:
                live.category = kind
    for shard in shards:
        for local in _plain(shard.local, device):
            owner = storages.get(local.untyped_storage().data_ptr())
            if owner is not None and owner.name is None:
                owner.name = shard.name
    return sorted(storages.values(), key=lambda live: -live.n_bytes)[:count]


def snapshot_blocks(snapshot: Mapping[str, Any] | None, index: int | None) -> dict[int, tuple[int, str | None]]:
    """Address → (bytes, line of Python that allocated it, if history was kept) of one device's blocks in use."""
    blocks: dict[int, tuple[int, str | None]] = {}
    for segment in (snapshot or {}).get("segments", ()):
        if index is not None and segment["device"] != index:
            continue
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                frames = [frame for frame in block.get("frames") or () if frame["filename"].endswith(".py")]
                users = (frame for frame in frames if "/torch/" not in frame["filename"])
                line = next((f"{frame['filename']}:{frame['line']} in {frame['name']}" for frame in users), None)
                blocks[block["address"]] = (block["size"], line)
    return blocks


def _plain(tensor: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """The strided tensors with real memory on the device; fake tensors claim to be there, but have none."""
    for local in local_tensors(tensor):
        local_device = local.device
        if local_device.type != device.type or (device.index is not None and local_device.index != device.index):
            continue
        if local.layout == torch.strided:
            storage = local.untyped_storage()
            if storage.device.type != "meta" and storage.nbytes():
                yield local


SCHEMA = 1
FOLDER = "oom"
TENSORS = 20
"""Number of the largest tensors to list."""

_FRAGMENTED = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_LOG = logging.getLogger(__name__)
_DOING = {"init": "while loading the task", "wrap": "while wrapping the model", "save": "while saving step {step}"}
_FIGURES = ("limit", "free", "allocated", "reserved", "fragmentation", "missing", "exact")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Advice:
    change: str  # settings as on the command line, separated by spaces; or a variable of the environment
    saving_bytes: int | None  # bytes saved; None if the change was not planned
    cost: str  # its price, in time or otherwise
    planned: str = ""  # the memory with this change, in words; empty if it was not planned
    verdict: str = ""  # of the plan

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value or key not in ("planned", "verdict")}


class Subject(Protocol):
    """The strategy that trains, as far as a post-mortem needs it."""

    @property
    def model(self) -> nn.Module: ...

    def state_tensors(self) -> Iterable[tuple[StateKind, torch.Tensor]]: ...

    def shards(self) -> Iterable[Any]: ...


class PostMortem:
    """Records why one rank lacks memory, with advice."""

    def __init__(
        self,
        config: RunConfig,
        ledger: MemoryLedger,
        subject: Subject,  # its model may not exist yet
        local_world_size: int = 1,  # ranks on this machine
        cap: MemoryCap | None = None,  # the rank's memory cap on the CPU
        planned: Callable[[], list[Advice]] | None = None,
    ) -> None:
        self.planned = planned
        self._config, self._ledger, self._subject, self._cap = config, ledger, subject, cap
        self.packable = (0.0, 0.0)
        self._local_world_size = local_world_size
        self._gaps: list[str] = []
        shortages.observe(ledger.device)

    @property
    def path(self) -> Path:
        return Path(self._config.run.dir) / FOLDER / f"rank{self._ledger.rank}.json"

    def explain(self, error: BaseException) -> OutOfMemoryError | None:
        """Write the post-mortem of an exception and return the error to raise instead; `None` for other errors."""
        observed = shortages.of(error)
        if observed is None:
            return None
        self._gaps = []
        model = self._attempt("the model", lambda: self._subject.model, None)
        phase = phase_of(error) or self._ledger.open_phase
        row = self._row()
        shortage = self._completed(observed, row)
        growth = None if row.device_mem is None else row.device_mem.growth
        # Any setting only puts the end off for memory that grows with each step.
        advice = [] if growth else self._advice(shortage, row, phase)
        record = {
            **self._head(shortage, row),
            "phase": phase,
            "module": self._attempt("the module", lambda: module_of(error, model), None),
            "at": raised_at(error),
            "message": str(error)[:4000],
            "tensors": [live.to_json() for live in self._tensors(shortage)],
            "advice": [tip.to_json() for tip in advice],
            "snapshot": self._save_snapshot(shortage),
        }
        problem = self._write(record)
        if self.planned is not None and shortage.kind != "host" and not growth:
            plans: list[Advice] = self._attempt("planned advice", self.planned, list[Advice]())
            planned_changes = {tip.change for tip in plans}
            n_fitting = sum(tip.verdict != "does not fit" for tip in plans)
            advice = [tip for tip in advice if tip.change not in planned_changes]
            advice = plans[:n_fitting] + advice + plans[n_fitting:]
            problem = self._write({**record, "advice": [tip.to_json() for tip in advice]})
        cause, fix = _cause(record, self._config.memory.cap), _fix(advice, self.path, problem, row)
        return OutOfMemoryError(f"{cause}; it grew by {gib(growth)} in each step" if growth else cause, fix)

    def at_risk(self, row: RankRow) -> None:
        """Write a post-mortem while the host's memory is almost used up: a rank that is killed cannot."""
        self._gaps = []
        memory = row.host_mem
        used = memory.in_use or 0
        shortage = Shortage("host-risk", limit=memory.limit, free=max(0, memory.limit - used), allocated=memory.rss)
        advice = self._advice(shortage, row, None)
        record = {**self._head(shortage, row), "phase": None, "module": None, "at": None}
        problem = self._write(
            {**record, "message": None, "tensors": [], "advice": [tip.to_json() for tip in advice], "snapshot": None}
        )
        if problem:
            _LOG.warning("cannot write %s: %s", self.path, problem)

    def _head(self, shortage: Shortage, row: RankRow) -> dict[str, Any]:
        identity = row.identity
        return {
            "schema": SCHEMA, "kind": shortage.kind, "time": time.time(),
            "rank": identity.rank, "host": identity.host, "local_rank": identity.local_rank, "device": identity.device,
            "world_size": self._ledger.world_size, "step": self._ledger.step,
            "request": shortage.request, "op": shortage.op,
            "memory": {key: getattr(shortage, key) for key in _FIGURES},
            "row": row.to_json(),
        }  # fmt: skip

    def _row(self) -> RankRow:
        self._attempt("state", lambda: self._ledger.count_state(self._subject.state_tensors()), None)
        return self._ledger.row()

    def _completed(self, shortage: Shortage, row: RankRow) -> Shortage:
        """Add the host's limit, or on a GPU the allocator's figures if the error had none, and `memory.cap`'s limit."""
        now, cap = row.device_mem, self._config.memory.cap_bytes
        if shortage.kind == "host":
            return replace(shortage, limit=row.host_mem.limit)
        if shortage.kind != "device" or now is None:
            return shortage
        if shortage.allocated is None or shortage.reserved is None:
            shortage = replace(shortage, limit=now.total, allocated=now.allocated, reserved=now.reserved, exact=False)
        if cap is not None:
            shortage = replace(shortage, limit=cap, free=max(0, cap - (shortage.reserved or 0)))
        return shortage

    def _advice(self, shortage: Shortage, row: RankRow, phase: str | None) -> list[Advice]:
        """Changes that may help, not planned: those of the larger part of the memory first."""
        on_host = shortage.kind in ("host", "host-risk")
        state = row.state_on_device or 0
        not_state = (shortage.allocated or 0) - state + (shortage.request or 0)
        parts: tuple[str, ...] = ("activations", "state") if not_state > state else ("state", "activations")
        if phase not in ("forward", "backward", None):
            parts = ("state",)  # activations are gone, or were never there

        def changes() -> list[Advice]:
            found = candidates(
                self._config, self._ledger.world_size, self._local_world_size, self._ledger.device.type,
                short_of="host" if on_host else "device", parts=parts, packable=self.packable, planned=False,
            )  # fmt: skip
            return [Advice(settings, None, cost) for settings, cost in found]

        advice = self._attempt("advice", changes, list[Advice]())
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        idle, missing = shortage.fragmentation or 0, max(1, shortage.missing or 0)
        if shortage.kind == "device" and idle >= missing and "expandable_segments:True" not in settings:
            advice.insert(0, Advice(_FRAGMENTED, idle, "none to speak of"))
        return advice

    def _tensors(self, shortage: Shortage) -> list[Live]:
        device, subject = self._ledger.device, self._subject
        none: list[Any] = []
        state = self._attempt("state", lambda: list(subject.state_tensors()), none)
        shards = self._attempt("names", lambda: list(subject.shards()), none)
        made = [] if self._cap is None else self._cap.made()
        blocks = snapshot_blocks(shortage.snapshot, device.index)
        return self._attempt("tensors", lambda: biggest(TENSORS, device, state, shards, made, blocks), [])

    def _attempt(self, subject: str, find: Callable[[], _T], otherwise: _T) -> _T:
        """Return `find()`; if that fails, note why in the file and return `otherwise`: any state may be broken."""
        try:
            return find()
        except Exception as problem:
            gap = f"{subject}: {type(problem).__name__}: {problem}"
            if gap not in self._gaps:
                self._gaps.append(gap)
            return otherwise

    def _save_snapshot(self, shortage: Shortage) -> str | None:
        """The CUDA allocator's segments, with their history if it was recorded, for https://pytorch.org/memory_viz."""
        if shortage.snapshot is None:
            return None
        path = self.path.with_name(f"{self.path.stem}_snapshot.pickle")
        if problem := _replace(path, pickle.dumps(shortage.snapshot)):
            self._gaps.append(f"snapshot: {problem}")
        return None if problem else path.name

    def _write(self, record: dict[str, Any]) -> str | None:
        return _replace(self.path, json.dumps({**record, "gaps": self._gaps}, indent=1, default=str).encode() + b"\n")


def _replace(path: Path, content: bytes) -> str | None:
    """Write a file whole or not at all; returns the problem, if there was one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as problem:
        return problem.strerror or str(problem)
    return None


def _cause(record: dict[str, Any], cap: str | None) -> str:
    memory, request, phase = record["memory"], record["request"], record["phase"]
    in_phase = f"in {phase} of" if phase else "between the phases of"
    doing = f"{in_phase} step {record['step']}" if record["step"] else "before the first step"
    doing = _DOING.get(phase, doing).format(step=record["step"])
    inside = f" ({record['module']})" if record["module"] else ""
    memory_name = {"host": "the host's memory", "cap": f"memory.cap={cap}"}.get(
        record["kind"], f"{record['device']}'s memory"
    )
    if record["kind"] == "device" and cap is not None:
        memory_name = f"memory.cap={cap}"
    request_text = "it asked for more than there was" if request is None else f"it asked for {gib(request)}"
    free = "" if memory["free"] is None else f", {gib(memory['free'])} were free"
    idle = memory["fragmentation"] or 0
    pieces = f" and {gib(idle)} held in pieces" if request is not None and idle >= request else ""
    return f"rank {record['rank']} ran out of memory {doing}{inside}: {request_text} of {memory_name}{free}{pieces}"


def _fix(advice: list[Advice], path: Path, problem: str | None, row: RankRow) -> str:
    tips = "use more ranks, or a smaller model"
    if row.device_mem is not None and row.device_mem.growth:
        tips = "find the tensors that outlive their step: shardkit rehearse -- COMMAND names the line that makes them"
        if line := row.device_mem.growth_line:
            tips = f"drop the tensors that are made at {line}"
    elif fitting := [tip for tip in advice if tip.verdict != "does not fit"]:
        tips = "set " + ", or ".join(tip.change + f" ({tip.planned})" * bool(tip.planned) for tip in fitting[:2])
    file = f"see {path}" if problem is None else f"{path} could not be written: {problem}"
    return f"{tips}; {file}"
