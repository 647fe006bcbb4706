"""How evenly routers use a model's experts: counted by each rank in every layer, and summed over ranks now and then."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..parallel.experts import experts_of
from ..parallel.world import World
from ..telemetry.catalog import STARVED


class Routing:
    """The rows that each expert of each layer has got in training since the last `take`.

    Counting takes three small kernels a layer, which nothing waits for. Layers that are recomputed in backward count
    twice, so experts are compared within a layer.
    """

    def __init__(self, model: nn.Module) -> None:
        """`model`: before its experts are split over ranks."""
        self._n_experts: dict[str, int] = {}
        self._rows: dict[str, torch.Tensor] = {}
        if os.environ.get("EMUCUDA_COMPUTE") == "0":  # a rehearsal's device counts nothing, and refuses to be read
            return
        for name, module in experts_of(model).items():
            self._n_experts[name] = int(module.num_experts)  # type: ignore[arg-type]
            module.register_forward_pre_hook(partial(self._count, name))

    def _count(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        index = inputs[1] if len(inputs) > 1 else None  # of each row's experts, as docs/wide.md has it
        if not torch.is_grad_enabled() or not isinstance(index, torch.Tensor) or index.is_floating_point():
            return
        # One place more, for rows of no expert, and whatever else a module means: they would end a run on a GPU.
        n_places = self._n_experts[name] + 1
        experts = index.detach().reshape(-1).long().clamp(-1, n_places - 1) % n_places
        if name not in self._rows:
            self._rows[name] = experts.new_zeros(n_places)
        self._rows[name].scatter_add_(0, experts, experts.new_ones(1).expand_as(experts))

    def take(self, world: World) -> tuple[dict[str, float], dict[str, list[float]]]:
        """(figures for the step's record, each expert's rows over its layer's average, by layer); collective, and waits
        for the device."""
        counted = {name: rows[:-1].tolist() for name, rows in self._rows.items()}
        self._rows = {}
        local = [n for name, size in self._n_experts.items() for n in counted.get(name, [0] * size)]
        received, peaks = [0.0] * world.size, [0.0] * world.size
        if world.experts is not None:
            received[world.rank], peaks[world.rank] = world.experts.take_received()
        sums = world.sum([*received, *peaks, *map(float, local)])
        received, peaks, sums = sums[: world.size], sums[world.size : 2 * world.size], sums[2 * world.size :]
        loads, start = dict[str, list[float]](), 0
        for name, size in self._n_experts.items():
            rows, start = sums[start : start + size], start + size
            if (total := sum(rows)) > 0:
                loads[name] = [round(n * size / total, 3) for n in rows]
        figures = _figures(loads)
        if sum(received) > 0:
            figures |= {"ep_busiest_rank": max(received) * world.size / sum(received), "ep_peak": max(peaks)}
        return figures, loads


def _figures(loads: Mapping[str, list[float]]) -> dict[str, float]:
    if not loads:
        return {}
    every = [load for of_layer in loads.values() for load in of_layer]
    return {"busiest_expert": max(every), "starved_experts": sum(load < STARVED for load in every)}
