"""What failed on some rank becomes the same exception on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointError
from ..parallel.world import World
from .format.manifest import CorruptCheckpoint


def first_failure(failure: CheckpointException) -> tuple[int, BaseException]:
    """(rank, exception) of the lowest rank that failed in a collective save or load."""
    rank = min(failure.failures)
    return rank, failure.failures[rank][0]


def main_only(world: World, group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Do something to the file system on rank 0 while the others wait; collective.

    Raises:
        CheckpointError: on every rank, if the file system refuses.
    """
    problem = None
    if world.is_main:
        try:
            action()
        except OSError as error:
            problem = CheckpointError(f"{error.filename}: {error.strerror}", "check the owner and mode of run.dir")
    agreed(group, problem)


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
