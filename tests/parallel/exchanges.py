"""The exchange of ranges that ranks have written, and the messages that it takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from shardkit.parallel.weights import even_range, exchange
from shardkit.run.job import start


@contextmanager
def messages() -> Iterator[list[str]]:
    """The collectives that are called inside, and what is sent to one rank."""
    called: list[str] = []

    def noted(name: str, run: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return run(*args, **kwargs)

        return noting

    names = ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "isend")
    with patch.multiple(dist, **{name: noted(name, getattr(dist, name)) for name in names}):
        yield called


class Many(nn.Module):
    """Forty parameters, of 5.5 MB together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(261, 263) for _ in range(20)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x) for layer in self.layers), torch.zeros(()))


def exchanged() -> dict[str, int]:
    """Exchange ranges of tensors of several types, then those of engines; case → number of collectives."""
    out: dict[str, int] = {}
    with start(None, {"parallel.strategy": "ddp", "run.device": "cpu"}) as job:
        rank, size = job.world.rank, job.world.size
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(n, generator=generator) for n in (0, 1, 3, 1_400_003)]
        tensors += [tensors[-1] > 0, tensors[-1].bfloat16(), torch.arange(5), torch.tensor([torch.nan, -0.0, 0.0])]
        partial = [torch.full_like(part, 1) for part in tensors]
        for part, tensor in zip(partial, tensors, strict=True):
            start_at, end = even_range(len(part), rank, size)
            part[start_at:end] = tensor[start_at:end]
        with messages() as called:
            exchange(partial)
        for part, tensor in zip(partial, tensors, strict=True):
            assert torch.equal(part.view(torch.uint8), tensor.view(torch.uint8)), part.dtype
        out["tensors"] = len(called)
    for strategy in ("ddp", "zero1", "zero2"):
        with start(None, {"parallel.strategy": strategy, "run.device": "cpu"}) as job:
            wrapped: Any = job.wrap(Many)
            for shard in job.strategy.shards():
                if shard.name.startswith("model."):
                    shard.local.copy_(torch.arange(shard.start, shard.start + shard.local.numel()) * 2.0)
            with messages() as called:
                job.strategy.weights_changed()
            for name, param in wrapped.module.named_parameters():
                assert torch.equal(param.flatten(), torch.arange(param.numel()) * 2.0), name
            out[strategy] = len(called)
            del wrapped, shard, param
        gc.collect()
    return out
