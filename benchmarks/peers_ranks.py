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
        limit_s = CARD_LIMIT_S if mode == "card" else turns.LIMIT_S
        arguments = {"mode": mode, "engine": engine, "arm": arm, "tokens": tokens, "count": count}
        super().__init__(f"{engine} {arm}", "benchmarks.peers_ranks:answers", folder, limit_s, **arguments)


def answers(
    stream: TextIO, scratch: str, mode: str, engine: str, arm: str, tokens: str, count: int
) -> Iterator[dict[str, Any]]:
    """What a rank answers."""
    if mode == "card":
        yield seen_of(engine, arm, tokens, scratch, count)
        os._exit(0)  # a library's engine may keep its group and its threads
    steps = steps_of(engine, arm, tokens, scratch, count)
    if mode == "turns":
        yield from turns.timed(({"loss": loss} for loss in steps), stream)
    else:
        yield {"peak": peak_of(steps)} if mode == "peak" else {"refused": _refusal(steps)}
    steps.close()


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


def _refusal(steps: Iterator[float]) -> str:
    try:
        loss = next(steps)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise RuntimeError(f"it trains, with a loss of {loss}: move it to ARMS in peers_arms.py")
