"""Short runs of the table's features that only a real model shows, for every strategy."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkit.errors import ConfigError
from shardkit.parallel.compat import graph_breaks
from shardkit.run.job import start
from tests.strategies.cases import on_cpus

FEATURES: dict[str, dict[str, Any]] = {
    "unused_params": {}, "compile": {"compile.enabled": True},
    "compile_model": {"compile.enabled": True, "compile.scope": "model"},
}  # fmt: skip
"""Others are trained by tests/strategies/test_parity.py and tests/activation/test_strategies.py."""
STEPS, ROWS, LENGTH, VOCAB, WIDTH = 4, 4, 12, 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + hidden


class Model(nn.Module):
    """Next-token prediction without attention; `feature` decides whether a part is left out."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.unused = feature == "unused_params"
        if not self.unused:
            self.spare.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x if self.unused else x + 0.1 * self.spare(x))
        loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return loss


def settings(strategy: str, feature: str) -> dict[str, Any]:
    no_decay = {"optim.weight_decay": 0.0}  # ZeRO also decays parameters without a gradient
    return {**on_cpus(strategy), "optim.lr": 1e-2, **no_decay, **FEATURES[feature]}


def losses(strategies: list[str], feature: str) -> dict[str, list[float]]:
    """Loss of each step, every strategy in turn, the same global batches."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    return {name: _train(settings(name, feature), feature, rank, world) for name in strategies}


def broken_graphs(strategies: list[str], feature: str) -> dict[str, dict[str, int]]:
    """What is wrong with the compiled code of each strategy: graph breaks and recompilations by reason, and
    functions that are no module's forward."""
    import torch.distributed as dist
    from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

    found = {}
    for name in strategies:
        torch.compiler.reset()
        counters.clear()
        clear_compilation_metrics()
        _train(settings(name, feature), feature, dist.get_rank(), dist.get_world_size())
        made = get_compilation_metrics()
        again = Counter(str(one.recompile_reason) for one in made if one.recompile_reason)
        others = Counter(one.co_name for one in made if one.co_name not in (None, "forward"))
        found[name] = graph_breaks() | dict(again) | dict(others)
    return found


def refusals(strategies: list[str], feature: str) -> dict[str, tuple[str, str]]:
    """The error that ends a run under each strategy."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    out = {}
    for name in strategies:
        try:
            _train(settings(name, feature), feature, rank, world)
        except ConfigError as error:
            out[name] = error.cause, error.fix
        gc.collect()
    return out


def _train(overrides: dict[str, Any], feature: str, rank: int, world: int) -> list[float]:
    curve = []
    with start(None, overrides) as job:
        torch.manual_seed(0)
        job.wrap(Model(feature), block_classes=(Block,))
        for step in range(STEPS):
            g = torch.Generator().manual_seed(step)
            begin = torch.randint(0, VOCAB, (ROWS, 1), generator=g)
            tokens = (begin + 3 * torch.arange(LENGTH + 1)) % VOCAB
            mine = tokens.chunk(world)[rank]
            batch = (mine[:, :-1], mine[:, 1:])
            result = job.step([batch], lambda model, b: model(*b), lambda b: b[1].numel())
            curve.append(result.loss)
    gc.collect()
    return curve
