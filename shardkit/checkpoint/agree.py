"""What failed on some rank becomes the same exception on all of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointError
from .manifest import CorruptCheckpoint


def first_failure(failure: CheckpointException) -> tuple[int, BaseException]:
    """(rank, exception) of the lowest rank that failed in a collective save or load."""
    rank = min(failure.failures)
    return rank, failure.failures[rank][0]


def agreed(group: dist.ProcessGroup, problem: CheckpointError | None) -> None:
    """Raise the lowest rank's problem on every rank; a damaged checkpoint counts before anything else.

    Raises:
        CheckpointError: what some rank found.
    """
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    found = [p for p in problems if p is not None]
    for error in sorted(found, key=lambda p: not isinstance(p, CorruptCheckpoint)):
        raise error
