"""What a rehearsal keeps is a run directory that `shardkit report` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardkit.hardware.cards import GPUS
from shardkit.rehearse.rehearsal import write_report_files
from shardkit.rehearse.verdict import Verdict
from shardkit.report.measure import phase_peaks, status
from shardkit.report.page import run_page
from shardkit.report.read import read_run
from tests.rehearse.test_verdict import GIB, record


def sample(step: int, allocated: int) -> dict[str, Any]:
    return {
        "step": step, "time": 100.0 + step, "rss": GIB, "peak_rss": 2 * GIB, "allocated": allocated,
        "peak_allocated": 2 * allocated, "reserved": 3 * allocated, "peak_reserved": 3 * allocated,
    }  # fmt: skip


def phase(name: str, step: int, peak: int) -> dict[str, Any]:
    return {"phase": name, "step": step, "allocated": 1, "peak_allocated": peak, "reserved": 2, "peak_reserved": peak}


def test_a_report_shows_the_memory_over_time_and_by_category(tmp_path: Path) -> None:
    phases = [phase("building", 0, 3), phase("forward", 1, 5), phase("backward", 1, 9), phase("forward", 1, 7)]
    at_update = {"parameters": 11, "gradients": 12, "optimizer states": 13}
    records = [
        record(0, over_time=[sample(1, GIB), sample(2, 2 * GIB)], phases=phases, at_update=at_update),
        record(1, over_time=[sample(1, GIB)], phases=[], at_update={}),
    ]
    trace = {"step": 1, "device": "cuda:0", "peak": {"bytes": 9, "categories": {"activations": 9}, "phase": "backward"}}
    (tmp_path / "records" / "trace").mkdir(parents=True)
    (tmp_path / "records" / "trace" / "rank0.json").write_text(json.dumps(trace))
    write_report_files(tmp_path, ["python", "train.py"], records, Verdict("fits", "fits it", GPUS["h100"]))
    run = read_run(tmp_path)
    assert [(gather.step, [row.identity.rank for row in gather.rows]) for gather in run.gathers] == [
        (1, [0, 1]),
        (2, [0]),
    ]
    assert phase_peaks(run.gathers, 0) == {"init": 3, "forward": 7, "backward": 9}
    row = run.gathers[0].rows[0]
    assert row.device_mem is not None and row.device_mem.total == GPUS["h100"].memory
    assert row.state is not None and row.state["grads"].device == 12
    assert not run.notes and status(run) == (True, "rehearsed on emulated cards: fits it")
    page = run_page(run, tmp_path / "report.html")
    assert "activations" in page and "shardkit rehearse -- python train.py" in page
