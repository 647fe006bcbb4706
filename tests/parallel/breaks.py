"""Errors of context parallelism, put into a rank: what was wrong in other libraries, or would be easy to get wrong.

`python -m tests.parallel.breaks NAME OPTION …` runs `shardkit.train` with one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from shardkit.data.windows import places, split_rows
from shardkit.models import packed_attention
from shardkit.parallel.context import ContextParallel
from shardkit.tasks.hf_text import HFCausalLM
from tests.config.test_draws import Draw
from tests.parallel.context_runs import leaks

attend, to_heads, loss = packed_attention.attend, ContextParallel.to_heads, HFCausalLM.loss


def shifted_positions(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Each rank has the positions of its neighbour's tokens."""
    return {**split_rows(batch, rank, size), "positions": split_rows(batch, (rank + 1) % size, size)["positions"]}


def shifted_targets(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Targets are those of a rank's next token, not of the sequence's."""
    part = split_rows(batch, rank, size)
    return {**part, "targets": part["tokens"].roll(-1, 1)}


def merged_documents(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """After the first, two documents in turn count as one: attention crosses their bound."""
    part = split_rows(batch, rank, size)
    lengths = part["lengths"]
    pairs = [*lengths[:1], *(sum(lengths[i : i + 2]) for i in range(1, len(lengths), 2))]
    rows = len(batch["tokens"])
    return {**part, **{key: places(pairs, (rows, sum(pairs) // rows))[key] for key in ("bounds", "lengths")}}


def without_a_window(module: Any, *args: Any, **options: Any) -> Any:
    """The first layer attends to the whole document."""
    return attend(module, *args, **{**options, **({"sliding_window": None} if module.layer_idx == 0 else {})})


def half_gradient(self: ContextParallel, tensor: torch.Tensor) -> torch.Tensor:
    """The backward of an exchange divides by the ranks, as one that averages does."""
    heads = to_heads(self, tensor)
    return torch.lerp(heads.detach(), heads, 1 / self.size)


def first_share(self: ContextParallel, values: torch.Tensor) -> torch.Tensor:
    """Every rank takes the first heads' part."""
    return values.chunk(self.size)[0] if self.active else values


def whole_loss(self: HFCausalLM, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """A loss that is multiplied by the ranks that share a sequence (transformers 39648, Megatron-LM 673 and 906)."""
    return loss(self, model, batch) * self.config.parallel.cp


SPLIT, ATTEND = "shardkit.tasks.causal_lm.split_rows", "shardkit.models.packed_attention.attend"
BREAKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "positions": (SPLIT, shifted_positions),
    "targets": (SPLIT, shifted_targets),
    "documents": (SPLIT, merged_documents),
    "window": (ATTEND, without_a_window),
    "gradient": ("shardkit.parallel.context.ContextParallel.to_heads", half_gradient),
    "sinks": ("shardkit.parallel.context.ContextParallel.share", first_share),
    "loss": ("shardkit.tasks.hf_text.HFCausalLM.loss", whole_loss),
}
"""Name → what it replaces, and by what."""


@contextmanager
def broken(name: str) -> Iterator[None]:
    if not name:
        yield
        return
    target, error = BREAKS[name]
    with patch(target, error):
        yield


@dataclass(frozen=True)
class Broken(Draw):
    """A recorded training with one of the errors; "" is none."""

    name: str = ""

    def run(self, curve: list[tuple[float, float]]) -> None:
        with broken(self.name):
            super().run(curve)


def leaking(name: str) -> list[float]:
    """How much other documents' losses move with an error: `context_runs.leaks`."""
    with broken(name):
        return leaks(packed=True)


if __name__ == "__main__":
    from shardkit.train import main

    with broken(sys.argv[1]):
        sys.exit(main(sys.argv[2:]))
