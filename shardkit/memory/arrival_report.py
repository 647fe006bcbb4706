"""Name the ranks that stop reporting: a failed collective does not say which ranks were missing."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import torch.distributed as dist

from ..errors import TrainingError

SETTLE_S = 5.0
"""Seconds that rank 0 waits for the others' notes after a gather failed: some ranks are merely late."""
_POLL_S = 0.05
# gloo's message without the source file before it and the advice after it.
_NOISE = re.compile(r"^(?:\[[^\]]*\] )?(.*?)(?:\. This is typically.*)?$", re.DOTALL)


class ArrivalReport:
    """Each rank notes in the group's key-value store that it has reached a gather; rank 0 looks only if one fails.

    A note is one message to the store that nobody waits for (2 to 30 µs); the store keeps one key per rank.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._store = group.get_group_store()
        self._rank = rank

    def note(self, step: int) -> None:
        """Note that this rank has reached the gather after `step`."""
        self._store.set(_key(self._rank), str(step))

    def explain(self, step: int, names: Sequence[str], reason: Exception) -> TrainingError:
        """The error that names the ranks missing from the gather after `step`; `names` are all ranks', in order."""
        missing = [
            f"rank {names[rank]} ({'never did' if seen is None else f'last at step {seen}'})"
            for rank, seen in self._missing(step, len(names)).items()
        ]
        match = _NOISE.match(" ".join(str(reason).split()))
        return TrainingError(
            f"memory was not gathered at step {step}; did not report: {', '.join(missing) or 'unknown'}: "
            f"{match[1] if match else reason}",
            "look at those ranks' logs: they were killed, failed, hang, or their node is lost",
        )

    def _missing(self, step: int, world_size: int) -> dict[int, int | None]:
        """Ranks that are not at `step` yet, with the step of their last report."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            seen = {rank: self._seen(rank) for rank in range(world_size)}
            late = {rank: seen_step for rank, seen_step in seen.items() if seen_step is None or seen_step < step}
            if not late or time.monotonic() > deadline:
                return late
            time.sleep(_POLL_S)

    def _seen(self, rank: int) -> int | None:
        return int(self._store.get(_key(rank))) if self._store.check([_key(rank)]) else None


def _key(rank: int) -> str:
    return f"shardkit/memory/{rank}"
