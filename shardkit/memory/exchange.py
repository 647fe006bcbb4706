"""The gather of every rank's row on rank 0, and the names of ranks that do not come to it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .arrival_report import ArrivalReport
from .rows import Identity, RankRow, decode, encode


class RowExchange:
    """Brings the rows of all ranks to rank 0, in one collective of constant size.

    Construction is collective: ranks learn each other's identities.

    Args:
        group: a gloo group of all ranks that no other thread uses; `None` for a single process.
        identity: this rank's.
    """

    def __init__(self, group: dist.ProcessGroup | None, identity: Identity, world_size: int) -> None:
        self._group, self._rank, self._world_size = group, identity.rank, world_size
        self._arrivals = None if group is None or world_size == 1 else ArrivalReport(group, identity.rank)
        self._identities = [identity] * world_size
        if world_size > 1:
            dist.all_gather_object(self._identities, identity, group=group)

    def collect(self, step: int, row: RankRow) -> list[RankRow]:
        """Every rank's row on rank 0, in rank order; empty elsewhere.

        Raises:
            TrainingError: on rank 0: some ranks did not report; the message names them.
        """
        if self._arrivals is None:
            return [row] if self._rank == 0 else []
        sent = torch.tensor([step, *encode(row)], dtype=torch.int64)
        received = [torch.empty_like(sent) for _ in range(self._world_size)] if self._rank == 0 else None
        self._arrivals.note(step)
        try:
            dist.gather(sent, received, group=self._group, group_dst=0)
        except RuntimeError as error:
            if received is None:
                raise
            raise self._arrivals.explain(step, [identity.name for identity in self._identities], error) from error
        return [] if received is None else self._decoded(step, received)

    def _decoded(self, step: int, received: list[torch.Tensor]) -> list[RankRow]:
        numbers = [tensor.tolist() for tensor in received]
        for identity, (their_step, *_) in zip(self._identities, numbers, strict=True):
            if their_step != step:
                raise RuntimeError(f"rank {identity.name} gathers memory at step {their_step}, rank 0 at step {step}")
        return [decode(identity, fields) for identity, (_, *fields) in zip(self._identities, numbers, strict=True)]
