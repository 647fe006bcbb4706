"""One start of an arm of `benchmarks.peers`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from . import turns
from .peers_arms import steps_of


class Ranks(turns.Ranks):
    """Two ranks of an arm.

    Args:
        mode: "turns"; or "peak" or "refusal" for one such answer.
        count: number of steps it will take.
    """

    def __init__(self, engine: str, arm: str, tokens: str, folder: Path, count: int, mode: str = "turns") -> None:
        arguments = {"mode": mode, "engine": engine, "arm": arm, "tokens": tokens, "count": count}
        super().__init__(f"{engine} {arm}", "benchmarks.peers_ranks:answers", folder, **arguments)


def answers(
    stream: TextIO, scratch: str, mode: str, engine: str, arm: str, tokens: str, count: int
) -> Iterator[dict[str, Any]]:
    """What a rank answers."""
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


def _refusal(steps: Iterator[float]) -> str:
    try:
        loss = next(steps)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise RuntimeError(f"it trains, with a loss of {loss}: move it to ARMS in peers_arms.py")
