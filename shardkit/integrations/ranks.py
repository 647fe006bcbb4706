"""The ranks of a loop that another tool runs."""

from __future__ import annotations

import os

import torch.distributed as dist

from ..errors import ConfigError
from ..parallel.world import rank_env


class LoopRanks:
    """The ranks of a loop's own process group, with a gloo group beside it."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, 0, 1
        if dist.is_initialized():
            env = rank_env()
            self.rank, self.size = env.rank, env.world_size
            self.local_rank, self.local_size = env.local_rank, env.local_world_size
        elif int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ConfigError(
                f"watch() was called in one of WORLD_SIZE={os.environ['WORLD_SIZE']} ranks, before they had a process "
                "group",
                "call it after torch.distributed.init_process_group, deepspeed.initialize or Accelerator()",
            )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def join(self) -> None:
        """Make the gloo group; collective."""
        if self.size > 1:
            self.group = dist.new_group(backend="gloo")

    def leave(self) -> None:
        """Close the group: ranks that wait in it learn that this one is gone."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def gather(self, value: object) -> list[object]:
        gathered: list[object] = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered
