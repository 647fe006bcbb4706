"""Random models whose attention has the hook of docs/long.md: ranks share sequences, one process has whole ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.parallel.context import ContextParallel

from .case import Batch

VOCAB, LENGTH, HEADS = 32, 12, 4


class Attention(nn.Module):
    """Causal attention within documents, drawn: heads of keys, a window, a softcap, a bias and a sink for each head."""

    context_parallel: ContextParallel | None = None

    def __init__(self, draws: random.Random, width: int) -> None:
        super().__init__()
        self.head, self.key_heads = width // HEADS, draws.choice([1, 2, HEADS])
        self.window, self.softcap = draws.choice([None, None, 1, 3, 7]), draws.choice([None, None, 2.0])
        self.query = nn.Linear(width, width, bias=draws.random() < 0.5)
        self.key_value = nn.Linear(width, 2 * self.key_heads * self.head, bias=False)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(self.head) if draws.random() < 0.3 else nn.Identity()
        self.slopes = nn.Parameter(torch.randn(HEADS) / 4) if draws.random() < 0.5 else None
        self.sinks = nn.Parameter(torch.randn(HEADS)) if draws.random() < 0.5 else None

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        query = self.norm(self.query(x).unflatten(2, (HEADS, self.head)))
        key, value = self.key_value(x).unflatten(2, (2 * self.key_heads, self.head)).chunk(2, 2)
        slopes, sinks, context = self.slopes, self.sinks, self.context_parallel
        if context is not None:
            query, key, value = context.to_heads(query), context.to_heads(key), context.to_heads(value)
            slopes, sinks = (None if each is None else context.share(each) for each in (slopes, sinks))
        shared = query.shape[2] // key.shape[2]
        query, key, value = (
            tensor.transpose(1, 2)
            for tensor in (query, key.repeat_interleave(shared, 2), value.repeat_interleave(shared, 2))
        )
        scores = query @ key.mT / self.head**0.5
        ago = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        if slopes is not None:
            scores = scores - slopes[:, None, None] * ago
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        mask = (
            (ago >= 0) & (ago < (self.window or LENGTH)) & (documents[:, None, :, None] == documents[:, None, None, :])
        )
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        out = (scores.softmax(-1)[..., :LENGTH] @ value).transpose(1, 2)
        if context is not None:
            out = context.to_positions(out)
        return self.out(out.flatten(2))


class Block(nn.Module):
    def __init__(self, attention: Attention, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), attention
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), documents)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = random.Random(f"{seed} model")
        width, n_blocks, shares = draws.choice([16, 32]), draws.randint(1, 3), draws.random() < 0.2
        self.embed, self.place = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        attention = Attention(draws, width)
        self.blocks = nn.ModuleList(
            Block(attention if shares else Attention(draws, width), width) for _ in range(n_blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        if draws.random() < 0.4:
            self.head.weight = self.embed.weight
        if draws.random() < 0.2:
            self.blocks[0].attention.query.requires_grad_(False)
        self.calls = draws.choice([1, 1, 1, 2])

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(positions)
        for _ in range(self.calls):
            for block in self.blocks:
                x = block(x, documents)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    seed: int
    settings: dict[str, Any]
    prebuilt: ClassVar[bool] = False
    steps: ClassVar[int] = 5
    rows: ClassVar[int] = 4
    resumes: ClassVar[bool] = False

    def build(self) -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return Model(self.seed)

    def all_batches(self, step: int, world: int) -> list[Batch]:
        """Micro-batches of whole rows, cut into documents at any place; some targets do not count."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        batches = []
        for _ in range(self.settings["train.grad_accum_steps"]):
            tokens = torch.randint(0, VOCAB, (self.rows, LENGTH + 1), generator=generator)
            starts = torch.rand(self.rows, LENGTH, generator=generator) < 0.3
            targets = tokens[:, 1:].masked_fill(torch.rand(self.rows, LENGTH, generator=generator) < 0.3, -100)
            begins = torch.where(starts, torch.arange(LENGTH), 0).cummax(1).values
            batches.append({
                "tokens": tokens[:, :-1], "targets": targets, "positions": torch.arange(LENGTH) - begins,
                "documents": starts.cumsum(1),
            })  # fmt: skip
        return batches

    def batches(self, step: int, rank: int, world: int) -> list[Batch]:
        """A rank's positions of its group's rows; of their documents, all."""
        size = self.settings["parallel.cp"]
        data_rank, part = divmod(rank, size)
        batches = []
        for batch in self.all_batches(step, world):
            rows = {name: tensor.chunk(world // size)[data_rank] for name, tensor in batch.items()}
            batches.append({n: t if n == "documents" else t[:, part::size] for n, t in rows.items()})
        return batches

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        logits = model(batch["tokens"], batch["positions"], batch["documents"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")

    def n_targets(self, batch: Batch) -> int:
        return int((batch["targets"] != -100).sum())

    def __str__(self) -> str:
        return f"{self.seed} with attention by the hook, {self.settings}"


def draw(seed: int, cp: int) -> Case:
    draws = random.Random(f"{seed} settings")
    settings: dict[str, Any] = {
        "train.grad_accum_steps": draws.choice([1, 2, 3]), "train.max_norm": draws.choice([None, 0.5]),
        "optim.schedule": "constant", "parallel.cp": cp, "activation.policy": draws.choice(["none", "none", "full"]),
    }  # fmt: skip
    if draws.random() < 0.5:
        settings |= {"optim.name": "sgd", "optim.lr": 0.1, "optim.weight_decay": 0.01}
    else:
        settings |= {"optim.name": "adamw", "optim.lr": 3e-3, "optim.weight_decay": 0.1, "optim.eps": 1e-5}
    return Case(seed, settings)
