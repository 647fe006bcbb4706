r"""A task of your own: a small convolutional model that spells Python's names, letter by letter.

Run it from the repository's root, under any strategy:

    PYTHONPATH=examples torchrun --standalone --nproc-per-node 2 \
        -m shardkit.train --config examples/my_task.yaml

Names have different lengths: micro-batches are padded, padding is not a target, and `n_targets` says how many letters a
micro-batch really asks for. Nothing here imports shardkit: a task is any class with these methods.
"""

from __future__ import annotations

import builtins
import importlib
import keyword
import sys
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 128
END = 0
IGNORED = -100
MODULES = ("argparse", "asyncio", "collections", "email", "logging", "math", "os", "socket", "ssl", "types", "unittest")


def names() -> list[str]:
    """Keywords, builtins, the library's modules and what some of them define, sorted."""
    found = {*keyword.kwlist, *dir(builtins), *sys.stdlib_module_names}
    for module in MODULES:
        found.update(dir(importlib.import_module(module)))
    return sorted(name for name in found if name.isascii() and not name.startswith("_"))


class Block(nn.Module):
    """Causal convolution and MLP, each with its norm and a residual: [batch, length, width] to the same."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.norm1 = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, kernel)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = F.pad(self.norm1(x).transpose(1, 2), (self.kernel - 1, 0))
        x = x + self.conv(past).transpose(1, 2)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Speller(nn.Module):
    """Letters [batch, length] to logits of the next letter [batch, length, VOCAB]."""

    def __init__(self, width: int, n_blocks: int, kernel: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, kernel) for _ in range(n_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Spelling:
    """The task. Called as `Spelling(config, **task.args)`."""

    block_classes = (Block,)

    def __init__(self, config: Any, width: int = 64, n_blocks: int = 2, kernel: int = 4) -> None:
        self.sizes = (width, n_blocks, kernel)

    def build_model(self) -> nn.Module:
        return Speller(*self.sizes)

    def dataset(self, split: Literal["train", "val"]) -> list[str]:
        return [name for i, name in enumerate(names()) if (i % 10 == 9) == (split == "val")]

    def collate(self, samples: list[str]) -> dict[str, torch.Tensor]:
        longest = max(map(len, samples)) + 1
        letters = torch.full((len(samples), longest), END)
        targets = torch.full((len(samples), longest), IGNORED)
        for row, name in enumerate(samples):
            codes = torch.tensor([*map(ord, name), END])
            letters[row, 1 : len(codes)] = codes[:-1]
            targets[row, : len(codes)] = codes
        return {"letters": letters, "targets": targets}

    def n_targets(self, batch: dict[str, torch.Tensor]) -> int:
        return int((batch["targets"] != IGNORED).sum())

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["letters"]).flatten(0, 1).float()
        return F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum")
