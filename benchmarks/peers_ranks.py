"""One start of an arm of `benchmarks.peers`."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from . import turns
from .bare import device
from .host_cost import CALLS, WAITS
from .peers_arms import each_step, steps_of

CARD_LIMIT_S = 900
CARD_MEASURED = 8
"""The last steps of a run on cards; earlier ones fill the allocator, and DDP and shardkit look at more of them."""


class Ranks(turns.Ranks):
    """Two ranks of an arm.

    Args:
        mode: "turns"; or "peak", "refusal" or "card" for one such answer.
        count: number of steps it will take.
    """

    def __init__(self, engine: str, arm: str, tokens: str, folder: Path, count: int, mode: str = "turns") -> None:
        argv = ["benchmarks.peers", "--worker", mode, engine, arm, tokens, str(count)]
        super().__init__(f"{engine} {arm}", argv, folder, CARD_LIMIT_S if mode == "card" else turns.LIMIT_S)

    def peak(self) -> int:
        """Peak bytes of the rank that took more."""
        return max(int(answer["peak"]) for answer in self.answers())

    def card(self) -> list[dict[str, Any]]:
        """What each rank saw of its card (`seen_of`)."""
        return self.answers()

    def refusal(self) -> str:
        said: str = self.answers()[0]["refused"]
        return said


def worker(mode: str, engine: str, arm: str, tokens: str, count: str, scratch: str) -> None:
    """The process of a rank."""
    if mode == "card":
        # A library's engine may keep its group and its threads: the answer is sent, so the process just ends.
        turns.serve(
            scratch, lambda _: iter([seen_of(engine, arm, tokens, scratch, int(count))]), end=lambda: os._exit(0)
        )
        return
    steps = steps_of(engine, arm, tokens, scratch, int(count))

    def answers(stream: TextIO) -> Iterator[dict[str, Any]]:
        yield from {"turns": turns.timed, "peak": _peak, "refusal": _refusal}[mode](steps, stream)
        steps.close()

    turns.serve(scratch, answers)


def _peak(steps: Iterator[float], _: TextIO) -> Iterator[dict[str, int]]:
    yield {"peak": peak_of(steps)}


def peak_of(steps: Iterator[Any]) -> int:
    """The peak of torch's CPU allocator, in bytes, while the steps are taken."""
    from torch.profiler import ProfilerActivity, profile

    from .plan_accuracy import allocated, held_addresses

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in steps:
            pass
        gc.collect()
        alive = held_addresses()
    return max(total for _, total in allocated(profiler, alive))


def seen_of(engine: str, arm: str, tokens: str, folder: str, count: int) -> dict[str, Any]:
    """Each step's loss; and of the last `CARD_MEASURED` steps peak bytes, calls and processor seconds.

    Peaks: the largest of all steps, whoever resets the allocator's between.
    """
    import emucuda
    import torch

    torch.cuda.set_device(device())
    raw, highest = torch._C._cuda_resetPeakMemoryStats, {"allocated": 0, "reserved": 0}

    def reset(*args: Any) -> None:
        keep()
        raw(*args)

    def keep() -> None:
        highest["allocated"] = max(highest["allocated"], torch.cuda.max_memory_allocated())
        highest["reserved"] = max(highest["reserved"], torch.cuda.max_memory_reserved())

    torch._C._cuda_resetPeakMemoryStats = reset
    losses: list[float] = []
    steps: list[dict[str, Any]] = []
    last: dict[str, Any] = {}

    def after(loss: float) -> None:
        losses.append(loss)
        calls, cpu_s = emucuda.counts(), time.process_time()
        if len(losses) > count - CARD_MEASURED:
            steps.append({
                "cpu_s": cpu_s - last["cpu_s"],
                "calls": {name: calls.get(name, 0) - last["calls"].get(name, 0) for name in (*WAITS, *CALLS)},
            })  # fmt: skip
        else:
            raw(torch.cuda.current_device())
            highest.update(allocated=0, reserved=0)
        last.update(calls=emucuda.counts(), cpu_s=time.process_time())

    each_step(engine, arm, tokens, folder, count, after)
    keep()
    calls = {name: int(median(step["calls"][name] for step in steps)) for name in (*WAITS, *CALLS)}
    return {
        "losses": losses, "peak": highest, "cpu_s": [step["cpu_s"] for step in steps],
        "calls": {name: number for name, number in calls.items() if number},
    }  # fmt: skip


def _refusal(steps: Iterator[float], _: TextIO) -> Iterator[dict[str, str]]:
    try:
        loss = next(steps)
    except (RuntimeError, ValueError) as error:
        yield {"refused": f"{type(error).__name__}: {error}"}
        return
    raise RuntimeError(f"it trains, with a loss of {loss}: move it to ARMS in peers_arms.py")
