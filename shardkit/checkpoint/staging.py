"""A host copy of the ranges that a rank writes, so that training can continue while they are written."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..memory.state import page_locked
from ..strategies.base import Shard


def give_way() -> None:
    """Let this thread, and those that it starts, use only idle cores: on Linux each thread has its own niceness."""
    thread_id = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread_id, min(19, os.getpriority(os.PRIO_PROCESS, thread_id) + 10))


class Staging:
    """Host buffers that the first save allocates and later saves reuse; page-locked if the rank has a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._buffers: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}

    @property
    def n_bytes(self) -> int:
        """Host memory that the buffers take on this rank."""
        sizes = [buffer.nbytes for buffer in self._buffers.values()]
        return sum(map(page_locked, sizes) if self._pin else sizes)

    def copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copy the ranges that this rank writes to the host; the copies are complete when this returns.

        Returns:
            The ranges, with the copy as `local` where this rank writes them.
        """
        staged = []
        for shard in shards:
            if shard.replica == 0:  # others are not written here, but their shapes are checked
                target = self._buffer((shard.name, shard.start, shard.local.numel(), shard.local.dtype))
                target.copy_(shard.local, non_blocking=self._pin)
                shard = replace(shard, local=target)
            staged.append(shard)
        if self._pin:
            torch.cuda.synchronize()
        return staged

    def _buffer(self, key: tuple[str, int, int, torch.dtype]) -> torch.Tensor:
        if key not in self._buffers:
            self._buffers[key] = torch.empty(key[2], dtype=key[3], pin_memory=self._pin)
        return self._buffers[key]
