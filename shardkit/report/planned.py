"""Predicted beside measured memory. Another program may have written the plan: any field may be missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import ShardkitError, gib
from ..hardware import calibration
from ..memory.rows import KINDS, RankRow, phase_name, pressure
from ..plan import history
from .figures import COLOURS, bar
from .html import LINES, Figure, unit_of
from .measure import UNATTRIBUTED, phase_peaks
from .read import Gather, Run, mapping, number, read_run, sequence
from .traced import categories_of, peak_of

PEAK = "peak allocated"


@dataclass(frozen=True)
class Compared:
    """A predicted and a measured figure in bytes; either may be missing."""

    rank: int
    figure: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """(predicted − measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


def compared(
    plan: Mapping[str, Any], gathers: Sequence[Gather], traces: Mapping[int, Mapping[str, Any]]
) -> list[Compared]:
    """Every figure that the plan predicts and the run could measure: peaks, phases on a GPU, categories.

    A plan lists several ranks in `ranks`, or describes one rank. It also holds for other ranks with equal shards.
    """
    rows = {row.identity.rank: row for row in gathers[-1].rows} if gathers else {}
    comparisons: list[Compared] = []
    for rank, entry in sorted(_planned(plan, rows).items()):
        row, trace = rows.get(rank), mapping(traces.get(rank))
        peak, device = mapping(entry.get("peak")), row.device_mem if row else None
        allocated = number(peak_of(trace).get("bytes")) if device is None else float(device.peak_allocated)
        comparisons.append(Compared(rank, PEAK, number(peak.get("allocated")), allocated))
        if device is not None:  # the CPU's allocator reserves nothing
            comparisons.append(Compared(rank, "peak reserved", number(peak.get("reserved")), device.peak_reserved))
        on_host = sum(n_bytes.host for n_bytes in row.state.values()) if row and row.state else None
        comparisons.append(Compared(rank, "tensors on the host", number(entry.get("host_peak")) or None, on_host))
        if device is not None:  # nor does it record the peaks of phases
            measured = phase_peaks(gathers, rank)
            for phase, figures in mapping(entry.get("phases")).items():
                name, bytes_planned = phase_name(phase), number(mapping(figures).get("allocated"))
                comparisons.append(Compared(rank, f"allocated in {name}", bytes_planned, measured.get(name)))
        comparisons += _categories(rank, entry, row, trace)
    return [c for c in comparisons if c.predicted is not None]


def _planned(plan: Mapping[str, Any], rows: Mapping[int, RankRow]) -> dict[int, Mapping[str, Any]]:
    """The plan of each rank; an unplanned rank takes the plan of a rank with the same bytes of state.

    Ranks differ only in the sizes of their shards.
    """
    entries = map(mapping, sequence(plan.get("ranks")) or [plan])
    plans = {int(rank): entry for entry in entries if (rank := number(entry.get("rank"))) is not None}
    by_rank = dict(plans)
    for rank, row in rows.items():
        alike = (planned for planned in plans if planned in rows and rows[planned].state == row.state)
        if rank not in plans and row.state is not None and (like := next(alike, None)) is not None:
            by_rank[rank] = plans[like]
    return by_rank


def _categories(rank: int, entry: Mapping[str, Any], row: RankRow | None, trace: Mapping[str, Any]) -> list[Compared]:
    at_peak = categories_of(trace)
    state = {kind: n_bytes.device for kind, n_bytes in (row.state or {}).items()} if row else {}
    comparisons = []
    for kind, figures in mapping(entry.get("categories")).items():
        predicted = number(mapping(figures).get("device"))
        measured = at_peak.get(kind, state.get(kind))  # type: ignore[call-overload]
        if predicted or measured:
            comparisons.append(Compared(rank, f"{kind} on the device", predicted, measured))
    if row is not None and row.unattributed is not None and not at_peak:
        categories = mapping(entry.get("categories"))
        not_state = (mapping(figures).get("device") for kind, figures in categories.items() if kind not in KINDS)
        together = sum(number(n_bytes) or 0 for n_bytes in not_state)
        comparisons.append(Compared(rank, "all but state", together or None, row.unattributed))
    return comparisons


def predicted(comparisons: Sequence[Compared]) -> Figure:
    """Bars of the peak, predicted beside measured, for every rank."""
    peaks = [c for c in comparisons if c.figure == PEAK]
    shown = [c for c in peaks if c.predicted is not None or c.measured is not None]
    unit, scale = unit_of(v for c in shown for v in (c.predicted, c.measured))
    ranks = [f"rank {c.rank}" for c in shown]
    traces = [
        bar(name, ranks, [None if (v := getattr(c, name)) is None else v / scale for c in shown], colour, unit)
        for name, colour in (("predicted", COLOURS[UNATTRIBUTED]), ("measured", LINES[0]))
    ]
    axis = {"title": {"text": f"{PEAK}, {unit}"}, "rangemode": "tozero"}
    layout = {"barmode": "group", "height": 300, "yaxis": axis}
    return Figure(traces if shown else [], layout, "the plan names no rank")


RANKS = 4
"""At most this many ranks get a column."""
_SETTINGS = (
    "task.name", "model.preset", "parallel.strategy", "parallel.offload_optimizer", "parallel.offload_param",
    "precision.mode", "activation.policy", "activation.offload", "optim.name", "train.micro_batch_size",
    "train.seq_len", "train.grad_accum_steps",
)  # fmt: skip
_LOG = logging.getLogger(__name__)


def close(run_dir: Path) -> None:
    """Print a planned run beside its plan and record it for later plans on this machine; on rank 0.

    Errors are only warnings: the run itself has succeeded.
    """
    try:
        run = read_run(run_dir)
        if run.plan is None or not run.gathers:
            return
        print(beside(compared(run.plan, run.gathers, run.traces), run))
        if len(run.metrics) > 1:  # the first step differs from the others
            history.note(entry(run, run.plan))
    except (ShardkitError, OSError) as error:
        _LOG.warning("this run is not noted for later plans: %s", error)


def beside(comparisons: Sequence[Compared], run: Run) -> str:
    """One line per predicted figure with the ranks' measurements; of many ranks those under most memory pressure."""
    from ..plan.show import columns  # a report without a plan need not load the planner

    compared_ranks = {c.rank for c in comparisons}
    ranks = [row for row in run.last_rows if row.identity.rank in compared_ranks]
    ranks = sorted(sorted(ranks, key=pressure, reverse=True)[:RANKS], key=lambda row: row.identity.rank)
    lines = [("", "predicted", *(f"rank {row.name}" for row in ranks))]
    by_name = {(c.figure, c.rank): c for c in comparisons}
    for figure in dict.fromkeys(c.figure for c in comparisons):
        cells = [by_name.get((figure, row.identity.rank)) for row in ranks]
        predicted = next((c.predicted for c in cells if c is not None and c.predicted is not None), 0.0)
        lines.append((figure, gib(predicted), *map(_cell, cells)))
    return "\n".join(columns(lines))


def _cell(comparison: Compared | None) -> str:
    if comparison is None or comparison.measured is None:
        return "–"
    return gib(comparison.measured) + ("" if comparison.error is None else f" ({comparison.error:+.1%})")


def entry(run: Run, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run in `past.jsonl`: the peak of any rank, and the bytes held outside torch's allocator."""
    predicted = mapping(next(iter(sequence(plan.get("ranks"))), None))
    peak = mapping(predicted.get("peak"))
    row = run.last_rows[0]
    on_gpu = row.device_mem is not None
    packages = mapping(run.environment.get("packages"))
    return {
        "schema": history.SCHEMA,
        "time": round(time.time()),
        "config": plan.get("config"),
        "settings": {name: run.setting(name) for name in _SETTINGS},
        "device": row.identity.device if on_gpu else calibration.cpu_name(),
        "world_size": len(run.last_rows),
        "versions": {"torch": packages.get("torch"), "shardkit": packages.get("shardkit"),
                     "deepspeed": packages.get("deepspeed"), "cuda": run.environment.get("cuda")},
        "predicted": {"peak": number(peak.get("allocated")), "reserved": number(peak.get("reserved")),
                      "required": number(peak.get("required")), "outside": number(predicted.get("overhead"))},
        "measured": {"peak": _peak(run), "reserved": _most(run, "peak_reserved"), "outside": _outside(run.gathers)},
    }  # fmt: skip


def _peak(run: Run) -> int | None:
    """Peak bytes of tensors: the allocator's figure on a GPU, on the CPU that of a traced step after the first."""
    if run.last_rows[0].device_mem is not None:
        return _most(run, "peak_allocated")
    peaks = [mapping(t.get("peak")).get("bytes") for t in run.traces.values() if (number(t.get("step")) or 0) > 1]
    return max((int(n) for n in map(number, peaks) if n is not None), default=None)


def _most(run: Run, name: str) -> int | None:
    return max((getattr(row.device_mem, name) for row in run.last_rows if row.device_mem is not None), default=None)


def _outside(gathers: Sequence[Gather]) -> int | None:
    """Bytes that the driver counts but torch's allocator does not: the median over ranks and gathers.

    The driver is read less often than the allocator: one gather may mix two moments.
    """
    differences = [
        memory.in_use - memory.reserved
        for gather in gathers
        for row in gather.rows
        if (memory := row.device_mem) is not None and memory.in_use is not None and memory.in_use >= memory.reserved
    ]
    return round(median(differences)) if differences else None
