"""Models with parameters of several chunks, and what each rank holds of them after `job.wrap`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from shardkit.parallel.weights import Weights
from shardkit.run.job import start
from shardkit.strategies.ddp import Wrapped
from tests.strategies.cases import on_cpus


class Layers(nn.Module):
    """An embedding of 2.3 chunks with a zero row, a tied head, a frozen linear of 1.1 chunks, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1201, 502, padding_idx=700)
        self.frozen = nn.Linear(502, 601).requires_grad_(False)
        self.norm = nn.LayerNorm(502)
        self.down = nn.Linear(601, 502)
        nn.init.trunc_normal_(self.down.weight, std=0.02)
        self.head = nn.Linear(502, 1201, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(nn.init.orthogonal_(torch.empty(300, 1000)))
        self.register_buffer("seen", torch.zeros(600, 1000))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        return self.head(x + self.down(self.frozen(x))) * self.scale + self.turned.sum()


def init_parameter(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    if fqn == "turned":
        nn.init.orthogonal_(full, generator=generator)
    elif fqn == "embed.weight":
        full.normal_(0.0, 0.02, generator=generator)
        full[700].zero_()
    elif full.dim() == 2:
        nn.init.kaiming_uniform_(full, generator=generator)
    else:
        full.fill_(0.5)


@contextmanager
def counted() -> Iterator[list[Weights]]:
    """The initial weights that `job.wrap` makes inside."""
    made: list[Weights] = []

    def noted(*args: Any) -> Weights:
        made.append(Weights(*args))
        return made[-1]

    with patch("shardkit.run.job.Weights", noted):
        yield made


def held(strategies: list[str]) -> dict[str, dict[str, Any]]:
    """ "<strategy> <drawn or built>" → this rank's part of each parameter, and how many values it drew."""
    out: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        for case, init in (("drawn", init_parameter), ("built", None)):
            with counted() as made, start(None, on_cpus(strategy)) as job:
                job.wrap(Layers, init_parameter=init)
                parts = {
                    s.name.removeprefix("model."): (s.start, s.local.flatten().float().clone().numpy())
                    for s in job.strategy.load_targets()
                    if s.name.startswith("model.")
                }
            out[f"{strategy} {case}"] = {"parts": parts, "values_drawn": made[0].values_drawn}
            gc.collect()
    return out


class Wide(nn.Module):
    """One embedding of 320 MB."""

    def __init__(self, rows: int = 80_000) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)


def _normal(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    full.normal_(0.0, 0.02, generator=generator)


def wide(strategy: str) -> dict[str, dict[str, float]]:
    """Case → MiB by which the wrap of `Wide` raised this rank's memory at its peak, and million values drawn.

    The peak ends where DeepSpeed's engine or torch's wrapper begins: gradients, masters and moments are on the CPU
    here.
    """
    import deepspeed

    out: dict[str, dict[str, float]] = {}
    for rows in (8, 80_000):  # the first one imports what is needed
        with counted() as made, start(None, on_cpus(strategy)) as job:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before, peaks = _status("VmRSS"), []

            def noted(*given: Any, peaks: Any = peaks, make: Any = deepspeed.initialize, **asked: Any) -> Any:
                peaks.append(_status("VmHWM"))
                return make(*given, **asked)

            wrapper = partial(noted, make=Wrapped)
            with patch("deepspeed.initialize", noted), patch("shardkit.strategies.ddp.Wrapped", wrapper):
                job.wrap(partial(Wide, rows), init_parameter=_normal)
            peaks.append(_status("VmHWM"))
            out["drawn"] = {"peak": peaks[0] - before, "drawn": made[0].values_drawn / 1e6}
        gc.collect()
    return out


def _status(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name)) / 1024
