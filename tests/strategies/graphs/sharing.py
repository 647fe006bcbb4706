"""Features of graphs whose parts belong to several places: shared, tied, called again, or reached from outside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .model import WIDTH, Feature, Graph, call_block


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.tanh(self.down(x)))


def adapted(block: Any, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    return hidden + block.adapter(hidden)


class SharedNorm(Feature):
    """One norm in several blocks."""

    name = "shared_norm"

    def build(self, graph: Graph) -> None:
        first, *others = graph.some_blocks(self.draws, at_least=2)
        for block in others:
            block.norm = first.norm


class SharedAdapter(Feature):
    """One adapter in several blocks."""

    name = "shared_adapter"

    def build(self, graph: Graph) -> None:
        adapter = Adapter()
        for block in graph.some_blocks(self.draws, at_least=2):
            block.adapter = adapter
            block.extras.append(adapted)


class SharedOutside(Feature):
    """A norm of a block that is also the model's."""

    name = "shared_outside"

    def build(self, graph: Graph) -> None:
        graph.outside = self.draws.choice(graph.some_blocks(self.draws)).norm

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * graph.outside(x)


class RepeatedMember(Feature):
    """One block twice in the list of blocks."""

    name = "repeated_member"

    def build(self, graph: Graph) -> None:
        graph.blocks.append(graph.blocks[self.draws.randrange(len(graph.blocks))])
        graph.order.append(len(graph.blocks) - 1)


class RepeatedCall(Feature):
    """Some or all blocks are called twice in a forward."""

    name = "repeated_call"

    def build(self, graph: Graph) -> None:
        again = graph.order if self.draws.random() < 0.5 else [self.draws.choice(graph.order)]
        graph.order = [*graph.order, *again]


class TiedHead(Feature):
    name = "tied_head"

    def build(self, graph: Graph) -> None:
        graph.head.weight = graph.embed.weight


class TiedBlocks(Feature):
    """One parameter in two blocks."""

    name = "tied_blocks"

    def build(self, graph: Graph) -> None:
        chosen = graph.claim(self.draws, 2)
        for block in chosen[1:]:
            block.mix.weight = chosen[0].mix.weight


class TiedOutside(Feature):
    """A parameter of a block that the model's own layer has too."""

    name = "tied_outside"
    weight = 0.5

    def build(self, graph: Graph) -> None:
        graph.last = nn.Linear(WIDTH, WIDTH)
        for block in graph.claim(self.draws):
            graph.last.weight = block.mix.weight

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x + graph.last(x)


class CalledFromOutside(Feature):
    """The model calls a part of a block, before the blocks or after them."""

    name = "part_called_from_outside"
    weight = 0.05

    def build(self, graph: Graph) -> None:
        self.index, self.first = self.draws.randrange(len(graph.blocks)), self.draws.random() < 0.5

    def used(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return block.norm(x) if self.first else 0.5 * block.mix(x)

    def enter(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x + self.used(graph.blocks[self.index], x) if self.first else x

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x if self.first else x + self.used(graph.blocks[self.index], x)


class WeightReadFromOutside(CalledFromOutside):
    """The model computes with a weight of a block."""

    name = "weight_read_from_outside"

    def used(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, block.mix.weight) if self.first else 0.5 * F.linear(x, block.mix.weight)


class OtherMethod(Feature):
    """The model calls a method of a block beside its forward."""

    name = "other_method"
    weight = 0.05

    def build(self, graph: Graph) -> None:
        self.index = self.draws.randrange(len(graph.blocks))

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        block: Any = graph.blocks[self.index]
        return x + block.score(x)


class OwnParameters(Feature):
    """Parameters that the model holds itself, beside its layers; one of them is a single number."""

    name = "own_parameters"

    def build(self, graph: Graph) -> None:
        graph.gain, graph.level = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.tensor(0.1))

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x * graph.gain + graph.level


class Bag(nn.Module):
    """Holds parameters, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.scale = nn.Linear(WIDTH, WIDTH)


class Container(Feature):
    """Parameters of a module that nobody calls: in the model or in blocks."""

    name = "container"

    def build(self, graph: Graph) -> None:
        self.inside = self.draws.random() < 0.5
        if self.inside:
            for block in graph.some_blocks(self.draws):
                block.bag = Bag()
                block.extras.append(lambda block, hidden, choice: block.bag.scale(hidden) + block.bag.shift)
        else:
            graph.bag = Bag()

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x if self.inside else x + 0.5 * graph.bag.scale(x) + graph.bag.shift


class ListWithParameter(nn.ModuleList):
    def __init__(self, modules: Any) -> None:
        super().__init__(modules)
        self.gain = nn.Parameter(torch.ones(WIDTH))


class ContainerList(Feature):
    """The list of blocks holds a parameter itself."""

    name = "container_list"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        graph.blocks = ListWithParameter(list(graph.blocks))

    def after(self, graph: Graph, index: int, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return x * graph.blocks.gain


class ParameterDict(Feature):
    name = "parameter_dict"

    def build(self, graph: Graph) -> None:
        self.inside = self.draws.random() < 0.5
        for holder in graph.some_blocks(self.draws) if self.inside else [graph]:
            setattr(holder, self.name, self.parameters(torch.ones(WIDTH), torch.randn(WIDTH, WIDTH) / WIDTH))
            if self.inside:
                holder.extras.append(lambda block, hidden, choice: self.applied(getattr(block, self.name), hidden))

    def parameters(self, gain: torch.Tensor, turn: torch.Tensor) -> nn.Module:
        return nn.ParameterDict({"gain": gain, "turn": turn})

    def applied(self, table: Any, x: torch.Tensor) -> torch.Tensor:
        return x * table["gain"] + x @ table["turn"]

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x if self.inside else self.applied(getattr(graph, self.name), x)


class ParameterList(ParameterDict):
    name = "parameter_list"

    def parameters(self, gain: torch.Tensor, turn: torch.Tensor) -> nn.Module:
        return nn.ParameterList([gain, turn])

    def applied(self, table: Any, x: torch.Tensor) -> torch.Tensor:
        return x * table[0] + x @ table[1]


class BlockOutside(Feature):
    """A block that is called once more after all others, by another name."""

    name = "block_by_another_name"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        graph.again = self.draws.choice(list(graph.blocks))

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return call_block(graph.again, x, choice)


FEATURES: list[type[Feature]] = [
    SharedNorm, SharedAdapter, SharedOutside, RepeatedMember, RepeatedCall, TiedHead, TiedBlocks, TiedOutside,
    CalledFromOutside, WeightReadFromOutside, OtherMethod, OwnParameters, Container, ContainerList, ParameterList,
    ParameterDict, BlockOutside,
]  # fmt: skip
