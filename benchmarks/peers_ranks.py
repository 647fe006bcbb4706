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
        argv = ["benchmarks.peers", "--worker", mode, engine, arm, tokens, str(count)]
        super().__init__(f"{engine} {arm}", argv, folder)

    def peak(self) -> int:
        """Peak bytes of the rank that took more."""
        return max(int(answer["peak"]) for answer in self.answers())

    def refusal(self) -> str:
        said: str = self.answers()[0]["refused"]
        return said


def worker(mode: str, engine: str, arm: str, tokens: str, count: str, scratch: str) -> None:
    """The process of a rank."""
    steps = steps_of(engine, arm, tokens, scratch, int(count))

    def answers(stream: TextIO) -> Iterator[dict[str, Any]]:
        yield from {"turns": turns.timed, "peak": _peak, "refusal": _refusal}[mode](steps, stream)
        steps.close()

    turns.serve(scratch, answers)


def _peak(steps: Iterator[float], _: TextIO) -> Iterator[dict[str, int]]:
    from torch.profiler import ProfilerActivity, profile

    from .plan_accuracy import allocated, held_addresses

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _loss in steps:
            pass
        gc.collect()
        alive = held_addresses()
    yield {"peak": max(total for _, total in allocated(profiler, alive))}


def _refusal(steps: Iterator[float], _: TextIO) -> Iterator[dict[str, str]]:
    try:
        loss = next(steps)
    except (RuntimeError, ValueError) as error:
        yield {"refused": f"{type(error).__name__}: {error}"}
        return
    raise RuntimeError(f"it trains, with a loss of {loss}: move it to ARMS in peers_arms.py")
