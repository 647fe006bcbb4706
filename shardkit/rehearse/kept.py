"""What `--keep DIR` leaves for `shardkit report DIR`: each rank's memory over time, and its curve by category.

The files have the forms of a run's, which docs/memory.md describes.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..hardware.cards import Gpu
from .verdict import FITS, Verdict

_PHASES = {"building": "init", "forward": "forward", "backward": "backward", "update": "update"}
"""A rehearsal's phases, and those of a run."""
_STATE = {"parameters": "params", "gradients": "grads", "optimizer states": "optimizer"}


def write_report_files(
    folder: Path, command: Sequence[str], records: Sequence[dict[str, Any]], verdict: Verdict
) -> None:
    """Write `memory.jsonl`, `trace/`, `config.yaml` and `env.json` into a rehearsal's folder."""
    ranks = {int(record["rank"]): record for record in records if record["devices"]}
    if (folder / "records" / "trace").is_dir():
        (folder / "records" / "trace").rename(folder / "trace")
    comment = f"# shardkit rehearse -- {shlex.join(command)}".replace("\n", " ")
    (folder / "config.yaml").write_text(f"{comment}\n")
    reason = verdict.reason if verdict.kind == FITS else f"{verdict.kind}: {verdict.reason}"
    about = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": list(command),
        "rehearsed": {"fits": verdict.kind == FITS, "reason": reason},
    }  # fmt: skip
    (folder / "env.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").touch()  # losses mean nothing
    with open(folder / "memory.jsonl", "w") as file:
        for step in sorted({sample["step"] for record in ranks.values() for sample in record["over_time"]}):
            rows = [
                (record, sample)
                for _, record in sorted(ranks.items())
                for sample in record["over_time"]
                if sample["step"] == step
            ]
            gather = {
                "schema": 2, "step": step, "time": round(max(sample["time"] for _, sample in rows), 3),
                "ranks": [_row(record, sample, verdict.card) for record, sample in rows],
            }  # fmt: skip
            file.write(json.dumps(gather) + "\n")


def _row(record: dict[str, Any], sample: dict[str, Any], card: Gpu) -> dict[str, Any]:
    """A rank's row at the end of a step; phases are known of the rank that tells its allocator's history."""
    resident = {"rss": sample["rss"], "peak_rss": sample["peak_rss"]}
    sizes = ("allocated", "peak_allocated", "reserved", "peak_reserved")
    phases: dict[str, dict[str, Any]] = {}
    for phase in record["phases"]:
        name = _PHASES.get(phase["phase"])
        if name is None or phase["step"] not in (sample["step"], 0):
            continue
        before = phases.get(name, {})
        peaks = {key: max(phase[key], before.get(key, 0)) for key in sizes if key.startswith("peak")}
        phases[name] = {**{key: phase[key] for key in sizes}, **peaks, **resident}
    device = next(iter(record["devices"]), "0")
    return {
        "rank": int(record["rank"]), "host": "rehearsal", "local_rank": int(device), "device": card.device_name,
        "step_time_s": None, "data_wait_s": None, "busy_s": None,
        "host_mem": {**resident, "uss": None, "children_rss": None, "limit": _machine_memory()},
        "device_mem": {**{key: sample[key] for key in sizes}, "total": card.memory},
        "state": {
            kind: {"device": record["at_update"][name], "host": 0}
            for name, kind in _STATE.items() if name in record["at_update"]
        } or None,
        "phases": phases, "alloc_retries": None, "overhead_s": 0.0,
        "ooms": sum(int(peaks["ooms"]) for peaks in record["devices"].values()),
    }  # fmt: skip


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
