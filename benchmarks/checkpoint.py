"""The speed of checkpoint writes and reads, and the cost of a background save for training, on 2 CPU ranks.

`python -m benchmarks.checkpoint` trains a transformer under FSDP2 and under ZeRO-2 in one process group and measures in
turns, on one disk, with every file synced before the clock stops: a raw sequential write and read of the same bytes
(one file per rank, memory to disk and back, no checksums), our save and load, our save in the background while training
continues, `torch.save` of the full state dict, and DeepSpeed's `save_checkpoint`. Reads never come from the page cache.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .checkpoint_arms import Clock, Run, deepspeed_save, forget, in_background, raw_read, raw_write, torch_save
from .common import FEWEST, median_ci, publish
from .options import Option, options, samples
from .overhead import on_two_ranks

GOALS = {"save_throughput": 0.7, "load_throughput": 0.7, "async_blocking": 0.2}


class Bench:
    """The arms, and the folder that is empty before each of them."""

    def __init__(self, folder: Path, layers: int, rest_s: float) -> None:
        self.fsdp, self.zero = Run("fsdp", layers, folder / "fsdp"), Run("zero2", layers, folder / "zero")
        self.clock, self.rest_s = Clock(), rest_s
        self.raw, self.peer = folder / "raw", folder / "peer"

    def clean(self) -> None:
        """Delete written files and let the disk come to rest: right after a write, the next one is slower."""
        self.clock.most(0)
        if self.fsdp.job.world.is_main:
            for path in (self.raw, self.peer, self.fsdp.folder, self.zero.folder):
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
            os.sync()
            time.sleep(self.rest_s)
        self.clock.most(0)

    def disk(self, number: int) -> dict[str, dict[str, float]]:
        """A raw write and read, and a save and load, each from a disk at rest; the first one alternates."""
        views, mine = self.fsdp.state(), self.raw / f"{self.fsdp.job.world.rank}.bin"
        times: dict[str, dict[str, float]] = {}

        def raw() -> None:
            self.clean()
            times["raw_write"] = self.clock(partial(raw_write, views, mine))
            self.cold(self.raw)
            times["raw_read"] = self.clock(partial(raw_read, views, mine))

        def ours() -> None:
            self.clean()
            times["save"] = self.clock(partial(self.fsdp.save, number))
            self.cold(self.fsdp.folder)
            times["load"] = self.clock(self.fsdp.load)

        for arm in (raw, ours) if number % 2 else (ours, raw):
            arm()
        return times

    def cold(self, where: Path) -> None:
        self.clock.most(0)
        forget(where)
        time.sleep(self.rest_s)
        self.clock.most(0)

    def others(self, number: int) -> dict[str, dict[str, float]]:
        """A save in the background, and each peer's save beside ours of the same engine."""
        times = {}
        for name, action in {
            "background": partial(in_background, self.fsdp, 10_000 + number, 2),
            "torch_save": partial(self.clock, partial(torch_save, self.fsdp, self.peer / "full.pt")),
            "zero_save": partial(self.clock, partial(self.zero.save, number)),
            "deepspeed_save": partial(self.clock, partial(deepspeed_save, self.zero, self.peer)),
        }.items():
            self.clean()
            times[name] = action()
        return times


def measure(folder: Path, layers: int, rounds: int, minutes: float, rest_s: float) -> dict[str, Any]:
    """On every rank: bytes of the checkpoint, the first round, and those that count."""
    import torch.distributed as dist

    bench = Bench(folder, layers, rest_s)
    n_bytes = sum(len(view) for view in bench.fsdp.state())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, n_bytes)
    measured: list[dict[str, dict[str, float]]] = []
    clock, began = bench.clock, time.monotonic()

    def has_time() -> bool:
        return clock.most(time.monotonic() - began) < 60 * minutes

    while len(measured) <= FEWEST or (len(measured) <= rounds and has_time()):
        number = len(measured) + 1
        measured.append({**bench.disk(number), **bench.others(number)})
    first, *rest = measured
    bench.zero.close()
    bench.fsdp.close()
    del bench
    gc.collect()
    return {"bytes": sum(every), "bytes_per_rank": max(every), "first": first, "rounds": rest}


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """Ratios of measurements of the same round, and throughputs in GiB/s."""
    rounds, gib = measured["rounds"], measured["bytes"] / 2**30

    def ratio(over: tuple[str, str], under: tuple[str, str]) -> tuple[float, float, float]:
        return median_ci([r[over[0]][over[1]] / r[under[0]][under[1]] for r in rounds])

    def speed(arm: str) -> float:
        return float(gib / median(r[arm]["s"] for r in rounds))

    everything = [measured["first"], *rounds]
    arms = ("save", "background", "torch_save", "zero_save", "deepspeed_save", "load")
    return {
        "save_throughput": ratio(("raw_write", "s"), ("save", "s")),
        "load_throughput": ratio(("raw_read", "s"), ("load", "s")),
        "async_blocking": ratio(("background", "blocking_s"), ("save", "s")),
        "first_async_blocking": measured["first"]["background"]["blocking_s"] / measured["first"]["save"]["s"],
        "training_speed_during_async": median_ci([r["background"]["training_speed"] for r in rounds]),
        "async_cost": median_ci(
            [(r["background"]["blocking_s"] + r["background"]["lost_s"]) / r["save"]["s"] for r in rounds]
        ),
        "over_torch_save": ratio(("save", "s"), ("torch_save", "s")),
        "over_deepspeed": ratio(("zero_save", "s"), ("deepspeed_save", "s")),
        "gib_per_s": {arm: speed(arm) for arm in ("raw_write", "save", "raw_read", "load")},
        "extra_memory": {
            arm: max(r[arm]["extra_bytes"] for r in everything) / measured["bytes_per_rank"] for arm in arms
        },
    }


def main() -> None:
    args = options(
        __doc__,
        rounds=samples(12, "at most; the first is for warming up"),
        minutes=Option(8.0, f"no new round after that, but at least {FEWEST}"),
        layers=Option(15, "each adds 144 MiB to the checkpoint"),
        disk=Option(Path.cwd(), "a folder on the disk to be measured"),
        rest=Option(2.0, "seconds before each use of the disk"),
    )
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="checkpoint-") as temp:
        sizes = {"layers": args.layers, "rounds": args.rounds, "minutes": args.minutes, "rest_s": args.rest}
        measured = on_two_ranks(measure, limit_s=3600 + 60 * args.minutes, folder=Path(temp), **sizes)
    publish("checkpoint", {"goals": GOALS, "ranks": 2, **summary(measured), "samples": measured})


if __name__ == "__main__":
    main()
