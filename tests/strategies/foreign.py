"""Models that nobody tuned shardkit for, one small training job for each, and what its ranks report."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.errors import ConfigError
from shardkit.run.job import start
from tests.strategies.cases import PARTITION_ALL

WIDTH, VOCAB, LENGTH, ROWS = 16, 40, 8, 4


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class ExpertLayer(nn.Module):
    """One expert a sample, chosen by the data: by the first token modulo their number."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([Expert() for _ in range(experts)])

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for index in (choice % len(self.experts)).unique().tolist():  # others are not even called
            rows = choice % len(self.experts) == index
            out[rows] = x[rows] + self.experts[index](self.norm(x[rows]))
        return out


class Experts(nn.Module):
    """Next-token prediction by layers with a list of experts each."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([ExpertLayer() for _ in range(layers)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, tokens[:, 0])
        logits: torch.Tensor = self.head(x)
        return logits


class TopExperts(nn.Module):
    """The same, but the experts are the model's only list: what `find_blocks` takes for its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixture = ExpertLayer()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.mixture(self.embed(tokens), tokens[:, 0]))
        return logits


class Leaver(nn.Module):
    """Ranks leave the model at different depths: the number of blocks follows the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([Expert() for _ in range(4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: 2 + int(tokens[0, 0]) % 3]:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Late(Leaver):
    """As `Leaver`, but for the first steps: only tokens above 30 leave early."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: 3 if int(tokens[0, 0]) > 30 else 4]:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def tokens(step: int, rows: int) -> torch.Tensor:
    """Token rows of a step's global batch; the first tokens differ from row to row, so that experts do too."""
    generator = torch.Generator().manual_seed(step)
    found = torch.randint(0, 30, (rows, LENGTH), generator=generator)
    found[:, 0] = torch.arange(rows)
    return found


def next_token(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")


def settings(strategy: str, **extra: Any) -> dict[str, Any]:
    found = {"parallel.strategy": strategy, "run.device": "cpu", "optim.lr": 1e-2, "optim.weight_decay": 0.1} | extra
    if strategy == "zero3":
        found["parallel.ds_config"] = PARTITION_ALL
    return found


def train(
    build: Callable[[], nn.Module],
    strategy: str,
    batches: Callable[[int, int], Any] = tokens,
    loss: Callable[[Any, Any], torch.Tensor] = next_token,
    block_classes: tuple[type[nn.Module], ...] = (),
    steps: int = 4,
    **extra: Any,
) -> list[float] | str:
    """Losses of each step over the same global batches, or the words of the refusal."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    try:
        with start(None, settings(strategy, **extra)) as job:
            job.wrap(build, block_classes=block_classes)
            found = []
            for step in range(steps):
                whole = batches(step, ROWS)
                mine = _rows(whole, rank, world)
                found.append(job.step([mine], loss, lambda batch: _first(batch).numel()).loss)
            return found
    except ConfigError as error:
        return str(error)
    finally:
        gc.collect()


def _rows(batch: Any, rank: int, world: int) -> Any:
    if isinstance(batch, dict):
        return {key: value.chunk(world)[rank] for key, value in batch.items()}
    return batch.chunk(world)[rank]


def _first(batch: Any) -> torch.Tensor:
    found: torch.Tensor = next(iter(batch.values())) if isinstance(batch, dict) else batch
    return found


def by_expert(strategies: list[str]) -> dict[str, Any]:
    """case → losses or refusal, of models whose ranks use different parts."""
    out: dict[str, Any] = {}
    for name in strategies:
        out[name, "nested"] = train(Experts, name)
        if name == "single":
            out[name, "top"] = train(TopExperts, name)
            continue
        out[name, "top"] = train(TopExperts, name)
        out[name, "leaver"] = train(Leaver, name)
        if name == "ddp":
            for case, model in (("nested", Experts), ("top", TopExperts)):
                out["ddp+unused", case] = train(model, name, **{"parallel.find_unused": True})
        if name == "fsdp":
            out["fsdp+class", "top"] = train(TopExperts, name, block_classes=(ExpertLayer,))
    return out
