"""A model with everything that is not a plain trained weight, and what each strategy makes of it."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.run.job import Job, start
from shardkit.strategies.build import CPUSyncBatchNorm
from tests.strategies.cases import on_cpus

STEPS, ROWS, LENGTH, VOCAB, WIDTH = 4, 8, 6, 19, 10


class Block(nn.Module):
    """A frozen linear with a low-rank adapter beside it, and batch norm over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.base(x) + self.up(self.down(x))
        return x + torch.tanh(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


class Odd(nn.Module):
    """Tied embedding and head; a rotation by fixed frequencies, which no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequency", 0.5 ** torch.arange(WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)[:, None] * self.frequency
        x = self.embed(tokens) * angle.cos()
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def init_parameter(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    """A rule of its own: orthogonal matrices, which need the whole of a parameter at once."""
    if full.dim() == 2:
        nn.init.orthogonal_(full, generator=generator)
    else:
        full.fill_(1.0 if fqn.endswith("norm.weight") else 0.0)


TRAINING = {"optim.lr": 1e-2, "train.max_norm": 0.5, "model.sync_batchnorm": True}


def outcomes(strategies: list[str], device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Strategy -> losses, gradient norms, buffers at the end, and how far each parameter is from what it was."""
    out = {}
    for strategy in strategies:
        with start(None, {**on_cpus(strategy), **TRAINING, "run.device": device}) as job:
            job.wrap(Odd, init_parameter=init_parameter, block_classes=(Block,))
            out[strategy] = _train(job)
        gc.collect()
    return out


def _train(job: Job) -> dict[str, Any]:
    before = {s.name: s.local.clone() for s in job.strategy.shards() if s.name.startswith("model.")}
    steps = [job.step([_rows(step, job)], lambda m, b: m(*b), lambda b: b[1].numel()) for step in range(STEPS)]
    after = {s.name: s.local for s in job.strategy.shards()}
    moved = {name.removeprefix("model."): not torch.equal(after[name], was) for name, was in before.items()}
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "moved": moved,
        "buffers": {name.removeprefix("module."): b.float().cpu().numpy() for name, b in job.model.named_buffers()},
        "synchronised": sum(isinstance(m, (CPUSyncBatchNorm, nn.SyncBatchNorm)) for m in job.model.modules()),
    }


def _rows(step: int, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the step's rows; rank 0 of two has three of eight."""
    chance = torch.Generator().manual_seed(step)
    begin = torch.randint(0, VOCAB, (ROWS, 1), generator=chance)
    rows = (begin + 4 * torch.arange(LENGTH + 1)) % VOCAB
    cut = math.ceil(ROWS * 0.3)
    mine = rows if job.world.size == 1 else (rows[:cut], rows[cut:])[job.world.rank]
    return mine[:, :-1], mine[:, 1:]
