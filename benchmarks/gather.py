"""Cost of gathering every rank's memory on rank 0 as the world grows: python -m benchmarks.gather [--worlds 2 8 64].

Real gloo ranks on this machine, forked from a process that has loaded torch. With far more ranks than cores, waiting
for ranks without a core dominates: so rank 0 is timed while all others already wait in the gather, and a gather that
all begin at once is timed too. Rank 0's own processor time is also counted: the cost that remains on a cluster, where
the other ranks run on their own machines.
"""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.memory.exchange import ROW_BYTES
from shardkit.memory.ledger import MemoryLedger
from shardkit.memory.rows import PHASES, gather_json
from tests.ranks import run_ranks

from .common import median_ci, publish
from .options import options, samples

WORLDS = (2, 4, 8, 16, 32, 64)
INTERVAL, STEP_S = 10, 0.05
"""The share of time assumes gathers at the default interval and steps of 50 ms."""
GOAL = 0.01
SETTLE_S = 0.002
"""Seconds per rank that rank 0 waits until the others are in the gather."""


class Ranks:
    """One rank's ledger, with everything in its row."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._barrier = dist.new_group(backend="gloo")
        self.ledger = MemoryLedger("cpu", dist.new_group(backend="gloo"), rank, world, rank)
        model = nn.Linear(8, 8)
        self.ledger.count_state(model, torch.optim.AdamW(model.parameters()))
        for phase in PHASES:
            with self.ledger.phase(phase):
                pass
        self._step = 0

    def gather(self, settled: bool) -> tuple[float, float]:
        """Seconds of a gather and its line, wall and this thread's; `settled`: rank 0 joins when all others wait."""
        self._step += 1
        self.ledger.end_step(self._step, STEP_S)
        dist.barrier(group=self._barrier)
        if settled and self._rank == 0:
            time.sleep(SETTLE_S * self._world)
        began, busy = time.perf_counter(), time.thread_time()
        rows = self.ledger.gather(self._step)
        if rows is not None:
            json.dumps(gather_json(self._step, 0.0, rows))
        return time.perf_counter() - began, time.thread_time() - busy


def timed(rounds: int) -> dict[str, Any]:
    """Seconds of each round's gathers on this rank, and the bytes of a row and of a line."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    for settled in (True, False):
        ranks.gather(settled)
    times: dict[str, list[float]] = {"rank_0": [], "rank_0_cpu": [], "together": []}
    for _ in range(rounds):
        wall, busy = ranks.gather(True)
        times["rank_0"].append(wall)
        times["rank_0_cpu"].append(busy)
        times["together"].append(ranks.gather(False)[0])
    rows = ranks.ledger.last_rows
    line = len(json.dumps(gather_json(1, 0.0, rows))) if rows else 0
    return {"times": times, "bytes_sent": ROW_BYTES, "line": line}


def measure(world: int, rounds: int) -> dict[str, Any]:
    rank = run_ranks(world, "benchmarks.gather:timed", timeout=600, rounds=rounds)[0]
    times = rank["times"]
    return {
        **{f"{name}_s": median_ci(samples) for name, samples in times.items()},
        "share_of_time": median(times["rank_0_cpu"]) / (INTERVAL * STEP_S),
        "bytes_sent_per_rank": rank["bytes_sent"],
        "jsonl_line_bytes": rank["line"],
        "samples": times,
    }


def main() -> None:
    args = options(__doc__, worlds=WORLDS, rounds=samples(40))
    worlds = {str(world): measure(world, args.rounds) for world in args.worlds}
    settings = {"interval": INTERVAL, "step_s": STEP_S, "rounds": args.rounds, "goal": GOAL}
    publish("gather", {**settings, "worlds": worlds})


if __name__ == "__main__":
    main()
