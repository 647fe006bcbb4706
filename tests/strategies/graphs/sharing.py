"""Features of graphs whose parts belong to several places: shared, tied, called again, or reached from outside."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .model import WIDTH, Graph, feature


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.tanh(self.down(x)))


@feature()
def shared_norm(graph: Graph, draws: Random) -> None:
    """One norm in several blocks."""
    first, *others = graph.some_blocks(draws, at_least=2)
    for block in others:
        block.norm = first.norm


@feature()
def shared_adapter(graph: Graph, draws: Random) -> None:
    """One adapter in several blocks."""
    adapter = Adapter()
    for block in graph.some_blocks(draws, at_least=2):
        block.adapter = adapter
        block.extras.append(lambda block, hidden, choice: hidden + block.adapter(hidden))


@feature()
def shared_outside(graph: Graph, draws: Random) -> None:
    """A norm of a block that is also the model's."""
    graph.outside = draws.choice(graph.some_blocks(draws)).norm
    graph.leaves.append(lambda x, choice: x + 0.5 * graph.outside(x))


@feature()
def repeated_member(graph: Graph, draws: Random) -> None:
    """One block twice in the list of blocks."""
    graph.blocks.append(graph.blocks[draws.randrange(len(graph.blocks))])
    graph.order.append(len(graph.blocks) - 1)


@feature()
def repeated_call(graph: Graph, draws: Random) -> None:
    """Some or all blocks are called twice in a forward."""
    again = graph.order if draws.random() < 0.5 else [draws.choice(graph.order)]
    graph.order = [*graph.order, *again]


@feature()
def tied_head(graph: Graph, draws: Random) -> None:
    graph.head.weight = graph.embed.weight


@feature()
def tied_blocks(graph: Graph, draws: Random) -> None:
    """One parameter in two blocks."""
    chosen = graph.claim(draws, 2)
    for block in chosen[1:]:
        block.mix.weight = chosen[0].mix.weight


@feature(weight=0.5)
def tied_outside(graph: Graph, draws: Random) -> None:
    """A parameter of a block that the model's own layer has too."""
    graph.last = nn.Linear(WIDTH, WIDTH)
    for block in graph.claim(draws):
        graph.last.weight = block.mix.weight
    graph.leaves.append(lambda x, choice: x + graph.last(x))


Use = Callable[[Any, torch.Tensor], torch.Tensor]


def reach(graph: Graph, draws: Random, early: Use, late: Use) -> None:
    """Use a block before the blocks, or after them."""
    index = draws.randrange(len(graph.blocks))
    if draws.random() < 0.5:
        graph.enters.append(lambda x, choice: x + early(graph.blocks[index], x))
    else:
        graph.leaves.append(lambda x, choice: x + 0.5 * late(graph.blocks[index], x))


@feature(weight=0.05)
def part_called_from_outside(graph: Graph, draws: Random) -> None:
    """The model calls a part of a block."""
    reach(graph, draws, lambda block, x: block.norm(x), lambda block, x: block.mix(x))


@feature(weight=0.05)
def weight_read_from_outside(graph: Graph, draws: Random) -> None:
    """The model computes with a weight of a block."""
    reach(graph, draws, *[lambda block, x: F.linear(x, block.mix.weight)] * 2)


@feature(weight=0.05)
def other_method(graph: Graph, draws: Random) -> None:
    """The model calls a method of a block beside its forward."""
    index = draws.randrange(len(graph.blocks))
    graph.leaves.append(lambda x, choice: x + graph.blocks[index].score(x))


@feature()
def own_parameters(graph: Graph, draws: Random) -> None:
    """Parameters that the model holds itself, beside its layers; one of them is a single number."""
    graph.gain, graph.level = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.tensor(0.1))
    graph.leaves.append(lambda x, choice: x * graph.gain + graph.level)


class Bag(nn.Module):
    """Holds parameters, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.scale = nn.Linear(WIDTH, WIDTH)


@feature()
def container(graph: Graph, draws: Random) -> None:
    """Parameters of a module that nobody calls: in the model or in blocks."""
    if draws.random() < 0.5:
        for block in graph.some_blocks(draws):
            block.bag = Bag()
            block.extras.append(lambda block, hidden, choice: block.bag.scale(hidden) + block.bag.shift)
    else:
        graph.bag = Bag()
        graph.leaves.append(lambda x, choice: x + 0.5 * graph.bag.scale(x) + graph.bag.shift)


class ListWithParameter(nn.ModuleList):
    def __init__(self, modules: Any) -> None:
        super().__init__(modules)
        self.gain = nn.Parameter(torch.ones(WIDTH))


@feature(weight=0.7)
def container_list(graph: Graph, draws: Random) -> None:
    """The list of blocks holds a parameter itself."""
    graph.blocks = ListWithParameter(list(graph.blocks))
    graph.afters.append(lambda index, x, before: x * graph.blocks.gain)


def hold(graph: Graph, draws: Random, name: str, made: Callable[[Any], Any], gain: Any, turn: Any) -> None:
    """A table of two parameters, in the model or in blocks."""

    def applied(module: Any, x: torch.Tensor) -> torch.Tensor:
        table = getattr(module, name)
        return x * table[gain] + x @ table[turn]

    inside = draws.random() < 0.5
    for holder in graph.some_blocks(draws) if inside else [graph]:
        setattr(holder, name, made([torch.ones(WIDTH), torch.randn(WIDTH, WIDTH) / WIDTH]))
        if inside:
            holder.extras.append(lambda block, hidden, choice: applied(block, hidden))
    if not inside:
        graph.leaves.append(lambda x, choice: applied(graph, x))


@feature()
def parameter_list(graph: Graph, draws: Random) -> None:
    hold(graph, draws, "parameter_list", nn.ParameterList, 0, 1)


@feature()
def parameter_dict(graph: Graph, draws: Random) -> None:
    made = lambda values: nn.ParameterDict(zip(("gain", "turn"), values, strict=True))  # noqa: E731
    hold(graph, draws, "parameter_dict", made, "gain", "turn")


@feature(weight=0.7)
def block_by_another_name(graph: Graph, draws: Random) -> None:
    """A block that is called once more after all others, by another name."""
    graph.again = draws.choice(list(graph.blocks))
    graph.leaves.append(lambda x, choice: graph.again.call(x, choice))
