"""The end of a run that was planned: what was predicted beside what was measured, also for the plans to come."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import ShardkitError
from ..hardware import calibration
from ..memory.units import gib
from ..plan import history
from ..plan.show import columns
from .measure import shown
from .planned import Compared, compared
from .read import Gather, Run, mapping, number, read_run, sequence

RANKS = 4
"""So many ranks get a column."""
_SETTINGS = (
    "task.name", "model.preset", "parallel.strategy", "parallel.offload_optimizer", "parallel.offload_param",
    "precision.mode", "activation.policy", "activation.offload", "optim.name", "train.micro_batch_size",
    "train.seq_len", "train.grad_accum_steps",
)  # fmt: skip
_LOG = logging.getLogger(__name__)


def close(run_dir: Path) -> None:
    """Print how a planned run compares with its plan, and note it for the next plans on this machine; on rank 0.

    What goes wrong is warned about: the run is over and well.
    """
    try:
        run = read_run(run_dir)
        if run.plan is None or not run.gathers:
            return
        print(beside(compared(run.plan, run.gathers, run.traces), run))
        if len(run.metrics) > 1:  # the first step is not like the others
            history.note(entry(run, run.plan))
    except (ShardkitError, OSError) as error:
        _LOG.warning("this run is not noted for later plans: %s", error)


def beside(found: Sequence[Compared], run: Run) -> str:
    """A line for each figure that was predicted, with what the ranks measured, of many ranks the largest."""
    ranks = [row for row in shown(run.last_rows) if any(c.rank == row.identity.rank for c in found)][:RANKS]
    lines = [("", "predicted", *(f"rank {row.name}" for row in ranks))]
    by_name = {(c.what, c.rank): c for c in found}
    for what in dict.fromkeys(c.what for c in found):
        cells = [by_name.get((what, row.identity.rank)) for row in ranks]
        predicted = next((c.predicted for c in cells if c is not None and c.predicted is not None), 0.0)
        lines.append((what, gib(predicted), *map(_cell, cells)))
    return "\n".join(columns(lines))


def _cell(one: Compared | None) -> str:
    if one is None or one.measured is None:
        return "–"
    return gib(one.measured) + ("" if one.error is None else f" ({one.error:+.1%})")


def entry(run: Run, plan: Mapping[str, Any]) -> dict[str, Any]:
    """What `past.jsonl` keeps of a run: the most of any rank, and what ranks held beyond torch's allocator."""
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
    """The most tensors held: on a GPU the allocator's figure, on the CPU that of a traced step but the first."""
    if run.last_rows[0].device_mem is not None:
        return _most(run, "peak_allocated")
    peaks = [mapping(t.get("peak")).get("bytes") for t in run.traces.values() if (number(t.get("step")) or 0) > 1]
    return max((int(n) for n in map(number, peaks) if n is not None), default=None)


def _most(run: Run, name: str) -> int | None:
    return max((getattr(row.device_mem, name) for row in run.last_rows if row.device_mem is not None), default=None)


def _outside(gathers: Sequence[Gather]) -> int | None:
    """What the driver counts and torch's allocator does not, the median over ranks and gathers.

    The driver is asked less often than the allocator: a single gather may tell of two moments.
    """
    found = [
        memory.in_use - memory.reserved
        for gather in gathers
        for row in gather.rows
        if (memory := row.device_mem) is not None and memory.in_use is not None and memory.in_use >= memory.reserved
    ]
    return round(median(found)) if found else None
