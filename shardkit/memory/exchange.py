"""The gather of every rank's row on rank 0, and the names of ranks that do not come to it."""

from __future__ import annotations

import pickle
import re
import time

import torch
import torch.distributed as dist

from ..errors import TrainingError
from .rows import Identity, RankRow

ROW_BYTES = 4096
"""Bytes that each rank sends: a row with every phase takes some 1,500, and long names of hosts and devices 500 more."""
SETTLE_S = 5.0
"""Seconds that rank 0 waits for the others' notes after a gather failed: some ranks are merely late."""
# gloo's message without the source file before it and the advice after it.
_NOISE = re.compile(r"^(?:\[[^\]]*\] )?(.*?)(?:\. This is typically.*)?$", re.DOTALL)


class RowExchange:
    """Brings the rows of all ranks to rank 0, in one collective of constant size.

    Construction is collective: ranks learn each other's names.

    Args:
        group: a gloo group of all ranks that no other thread uses; `None` for a single process.
        identity: this rank's.
    """

    def __init__(self, group: dist.ProcessGroup | None, identity: Identity, world_size: int) -> None:
        self._group, self._rank = group, identity.rank
        self._store = None if group is None else group.get_group_store()
        self._names = [identity.name] * world_size
        if world_size > 1:
            dist.all_gather_object(self._names, identity.name, group=group)

    def collect(self, step: int, row: RankRow) -> list[RankRow]:
        """Every rank's row on rank 0, in rank order; empty elsewhere.

        Raises:
            TrainingError: on rank 0: some ranks did not report; the message names them.
        """
        if self._store is None or len(self._names) == 1:
            return [row]
        # Not `gather_object`: it first gathers the sizes, a second collective. `pickle.loads` ignores the zeros behind.
        sent = bytearray(pickle.dumps((step, row)).ljust(ROW_BYTES, b"\0"))
        if len(sent) > ROW_BYTES:
            raise ValueError(f"the row of rank {row.name} takes {len(sent)} bytes, more than {ROW_BYTES}")
        received = [bytearray(ROW_BYTES) for _ in self._names] if self._rank == 0 else []
        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
        # A failed collective does not say which ranks were missing, so each leaves a note that nobody waits for (2 to
        # 30 µs). `monitored_barrier` would name them too, but every rank would wait for rank 0's answer at each gather.
        self._store.set(_key(self._rank), str(step))
        try:
            dist.gather(torch.frombuffer(sent, dtype=torch.uint8), tensors or None, group=self._group, group_dst=0)
        except RuntimeError as error:
            if self._rank != 0:
                raise
            missing, reason = self._missing(step), _without_noise(error)
            raise TrainingError(
                f"memory was not gathered at step {step}; did not report: {missing}: {reason}",
                "look at those ranks' logs: they were killed, failed, hang, or their node is lost",
            ) from error
        rows = []
        for rank_step, rank_row in map(pickle.loads, received):
            if rank_step != step:
                raise RuntimeError(f"rank {rank_row.name} gathers memory at step {rank_step}, rank 0 at step {step}")
            rows.append(rank_row)
        return rows

    def _missing(self, step: int) -> str:
        """The ranks that have not reached the gather after `step`, with their last one."""
        assert self._store is not None
        deadline = time.monotonic() + SETTLE_S
        while True:
            keys = map(_key, range(len(self._names)))
            seen = [int(self._store.get(key)) if self._store.check([key]) else None for key in keys]
            missing = [
                f"rank {name} ({'never did' if last is None else f'last at step {last}'})"
                for name, last in zip(self._names, seen, strict=True)
                if last is None or last < step
            ]
            if not missing or time.monotonic() > deadline:
                return ", ".join(missing) or "unknown"
            time.sleep(0.05)


def _without_noise(error: Exception) -> str:
    match = _NOISE.match(" ".join(str(error).split()))
    return match[1] if match else str(error)


def _key(rank: int) -> str:
    return f"shardkit/memory/{rank}"
