"""Run directories made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkit.memory.rows import PHASES, PhaseMemory, RankRow, StateBytes, gather_json
from tests.memory.samples import MIB, cpu_row, gpu_row
from tests.texts import write_files

EVIL = "<script>alert(1)</script>"
EVENTS = 40


def gpu_rows(step: int, host: str = "node") -> list[RankRow]:
    """Four ranks on two hosts; rank 3 has the largest peak, and waits longest for data."""
    rows = []
    for rank in range(4):
        row = gpu_row(rank, (3 + rank) * 2**30 + step * MIB, f"{host}{rank // 2}")
        peaks = {
            phase: PhaseMemory(2**30, (3 + rank) * 2**30 + step * MIB - index, 2**31, 2**33, 2**30, 2**31)
            for index, phase in enumerate(reversed(PHASES))
        }
        slow = 0.45 if rank == 3 else 0.1
        state = {**(row.state or {}), "params": StateBytes(2**29 + rank, 0)}
        rows.append(replace(row, busy_s=slow, data_wait_s=slow / 2, phases=peaks, state=state))
    return rows


def cpu_rows(step: int) -> list[RankRow]:
    return [cpu_row(rank, (300 + rank + step) * MIB) for rank in range(2)]


def write_run(
    path: Path,
    gpu: bool = False,
    steps: int = 20,
    wanted: int = 20,
    strategy: str = "fsdp",
    host: str = "node",
    args: str = "plain",
    lr: float = 0.001,
) -> Path:
    """The files of a run of `steps` steps that saves, evaluates and skips; every fifth step is gathered."""
    (path / "logs").mkdir(parents=True)
    config: dict[str, Any] = {
        "task": {"name": "causal_lm", "args": {"note": args}}, "model": {"preset": "debug", "d_model": 128},
        "parallel": {"strategy": strategy}, "precision": {"mode": "bf16"}, "train": {"max_steps": wanted},
        "optim": {"lr": lr}, "run": {"dir": str(path)},
    }  # fmt: skip
    (path / "config.yaml").write_text(f"# resolved\n{json.dumps(config, indent=1)}\n")
    environment = {
        "time": "2026-01-02T03:04:05+0000", "command": ["train.py"], "python": "3.11.7", "platform": "Linux",
        "packages": {"torch": "2.13.0", "deepspeed": None}, "cuda": None, "gpus": [], "git_commit": "abc",
    }  # fmt: skip
    (path / "env.json").write_text(json.dumps(environment))
    lines(path / "metrics.jsonl", [metrics(step) for step in range(1, steps + 1)])
    gathered = [step for step in range(1, steps + 1) if step == 1 or step % 5 == 0]
    lines(
        path / "memory.jsonl",
        [gather_json(step, 1.7e9 + step, gpu_rows(step, host) if gpu else cpu_rows(step)) for step in gathered],
    )
    return path


def metrics(step: int) -> dict[str, Any]:
    loss = 5 - 0.2 * step + (1.0 if step == 20 else 0.0)
    found: dict[str, Any] = {
        "step": step, "loss": loss, "grad_norm": None, "lr": 0.001, "tokens": 100, "tokens_total": 100 * step,
        "step_time_s": 0.5 if step == 1 else 0.25, "data_wait_s": 0.05, "tokens_per_s": 200.0 if step == 1 else 400.0,
        "skipped": float(step == 2),
    }  # fmt: skip
    if step > 10:  # the start before was of a release that did not know them
        found |= {"forward_s": 0.05, "backward_s": 0.1, "update_s": 0.025}
    return found | ({"val_loss": 3.25} if step == 10 else {}) | ({"save_s": 0.5} if step in (6, 12) else {})


def lines(path: Path, objects: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in objects))


def trace(rank: int = 0, module: str = "model.layers.0") -> dict[str, Any]:
    """A traced step whose stack sums to its timeline and whose peak is event 20."""
    totals = [[i, (i if i <= EVENTS // 2 else EVENTS - i) * 10 * MIB + rank] for i in range(EVENTS)]
    return {
        "schema": 1, "step": 3, "device": "cpu", "unit": "bytes",
        "peak": {
            "bytes": 200 * MIB + rank, "phase": "backward", "module": module,
            "categories": {"params": 60 * MIB, "activations": 100 * MIB, "unattributed": 40 * MIB + rank},
        },
        "phases": {
            "forward": {"bytes": 7, "phase": "forward", "module": module, "categories": {"params": 3, "workspace": 4}},
            "backward": {"bytes": 5, "phase": "backward", "module": "", "categories": {"params": 5}},
        },
        "timeline": totals,
        "bands": [
            {"module": "model", "phase": "forward", "begin": 0, "end": 19},
            {"module": module, "phase": "forward", "begin": 2, "end": 9},
            {"module": "model.layers.1", "phase": "forward", "begin": 10, "end": 18},
            {"module": module, "phase": "backward", "begin": 20, "end": 39},
        ],
        "stack": {"params": [n // 2 for _, n in totals], "activations": [-(-n // 2) for _, n in totals]},
        "largest": [
            {"bytes": 32 * MIB, "category": "activations", "phase": "forward", "module": module, "op": "aten::addmm",
             "shape": [8, 128]},
            {"bytes": 16 * MIB, "category": "params", "phase": "wrap", "module": "model.head", "op": "aten::empty",
             "shape": None},
        ],
    }  # fmt: skip


def plan() -> dict[str, Any]:
    """What was predicted for the four ranks of `gpu_rows`."""
    ranks = [
        {
            "rank": rank,
            "phases": {"backward": {"allocated": 3 * 2**30, "reserved": 2**32, "host": 2**30}},
            "peak": {"allocated": 3 * 2**30, "reserved": 2**32, "required": 2**32, "phase": "backward", "module": "m"},
            "categories": {"params": {"device": 2**29, "host": 0}, "activations": {"device": 2**30, "host": 0}},
        }
        for rank in range(4)
    ]
    return {"schema": 1, "verdict": "fits", "uncertainty": 0.05, "device_memory": 80 * 2**30, "ranks": ranks}


def post_mortem(module: str = "model.layers.3.mlp") -> dict[str, Any]:
    return {
        "schema": 1, "kind": "device", "time": 1.7e9, "rank": 1, "step": 21, "phase": "forward", "module": module,
        "request": 3 * 2**30, "memory": {"limit": 80 * 2**30, "free": 2**30, "fragmentation": None, "exact": True},
        "tensors": [{"bytes": 2**30, "category": "activations", "shape": [4, 4], "where": "train.py:3"}],
        "advice": [{"change": "activation.policy=full", "saving_bytes": 2**31, "cost": "time", "why": "x"}],
        "row": {"host_mem": {"rss": 5}}, "gaps": [],
    }  # fmt: skip


def add(path: Path, files: dict[str, dict[str, Any]]) -> None:
    write_files(path, {name: json.dumps(content) for name, content in files.items()})
