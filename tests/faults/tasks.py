"""A small stack of blocks that asks for too much memory: on one rank, from one loss on, where `how` says."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

KIB = 1024


class Grow(torch.autograd.Function):
    """Passes a tensor on, and asks for `n_bytes` on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n_bytes: int) -> torch.Tensor:
        ctx.n_bytes = n_bytes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.empty(ctx.n_bytes, dtype=torch.uint8, device=grad.device)
        return grad, None


class Block(nn.Module):
    """A linear layer that takes memory when `hungry` says where."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.hungry, self.n_bytes, self.passes = "", 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.hungry == "recompute"
        if self.hungry == "forward" or self.passes == 2:
            torch.empty(self.n_bytes, dtype=torch.uint8, device=x.device)
        if self.hungry == "backward":
            x = Grow.apply(x, self.n_bytes)
        return torch.relu(self.inner(x))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if self.hungry == "save":  # who saves lists them
            torch.empty(self.n_bytes, dtype=torch.uint8, device=self.inner.weight.device)
        return super().named_buffers(*args, **kwargs)


def fill(folder: str) -> None:
    """Leave no byte free on the file system of a folder."""
    with open(os.path.join(folder, "filler"), "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4 * KIB))
        except OSError:
            return


class Hungry:
    """`n_blocks` blocks; on rank `rank`, in the `calls`-th loss, the last but one takes `n_bytes` more: `how`."""

    block_classes = (Block,)

    def __init__(
        self, config: Any, how: str = "forward", rank: int = 1, calls: int = 3, n_bytes: int = 2**30, width: int = 64,
        n_blocks: int = 4,
    ) -> None:  # fmt: skip
        self.how, self.calls_left, self.n_bytes, self.width, self.n_blocks = how, calls, n_bytes, width, n_blocks
        self.here = int(os.environ.get("RANK", "0")) == rank
        self.kept: list[Any] = []
        self.run_dir = config.run.dir

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(Block(self.width) for _ in range(self.n_blocks)))

    def dataset(self, split: Literal["train", "val"]) -> list[torch.Tensor] | None:
        if split == "val":
            return None
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(self.width, generator=generator) for _ in range(64)]

    def n_targets(self, batch: torch.Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.here and self.calls_left <= 0:
            self._grow(model)
        return model(batch).square().sum()

    def _grow(self, model: nn.Module) -> None:
        if self.how == "fill":
            fill(self.run_dir)
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "pinned":
            self.kept.append(torch.empty(self.n_bytes, dtype=torch.uint8, pin_memory=True))
            return
        block = [module for module in model.modules() if isinstance(module, Block)][-2]
        block.hungry, block.n_bytes = self.how, self.n_bytes
