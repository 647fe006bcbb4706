"""Features of graphs whose forward does more than call one layer after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .model import (
    WIDTH,
    Block,
    BlockCall,
    DataclassBlock,
    DictBlock,
    Feature,
    Graph,
    KeywordBlock,
    RecursiveBlock,
    TupleBlock,
    call_block,
)
from .sharing import Adapter


def by_expert(experts: nn.ModuleList, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Adds what each row's expert makes of it; experts without a row are not called."""
    out = hidden.clone()
    for index in (choice % len(experts)).unique().tolist():
        rows = choice % len(experts) == index
        out[rows] = hidden[rows] + experts[index](hidden[rows])
    return out


class Experts(Feature):
    """Lists of experts in blocks, of which each row uses one."""

    name = "experts"
    shared = False

    def build(self, graph: Graph) -> None:
        number, first = self.draws.randint(2, 4), Adapter()
        for block in graph.some_blocks(self.draws, at_least=2 if self.shared else 1):
            block.experts = nn.ModuleList([Adapter() for _ in range(number)])
            if self.shared:
                block.experts[0] = first
            block.extras.append(lambda block, hidden, choice: by_expert(block.experts, hidden, choice))


class SharedExpert(Experts):
    """Blocks with experts of their own and one that is the same in all of them."""

    name = "shared_expert"
    weight = 0.5
    shared = True


class TopExperts(Feature):
    """A list of experts that the model itself calls."""

    name = "top_experts"
    weight = 0.5

    def build(self, graph: Graph) -> None:
        graph.experts = nn.ModuleList([Adapter() for _ in range(self.draws.randint(2, 4))])

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return by_expert(graph.experts, x, choice)


def for_even(call: BlockCall) -> BlockCall:
    """The call for rows of an even choice alone."""

    def for_some(x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        rows = choice % 2 == 0
        if not rows.any():
            return x
        out = x.clone()
        out[rows] = call(x[rows], choice[rows])
        return out

    return for_some


def branched(block: Any, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    return for_even(lambda x, choice: x + block.branch(x))(hidden, choice)


class Branch(Feature):
    """A part of a block that a micro-batch may not need."""

    name = "branch_by_data"
    weight = 0.25

    def build(self, graph: Graph) -> None:
        for block in graph.some_blocks(self.draws):
            block.branch = Adapter()
            block.extras.append(branched)


class SkippedByChance(Feature):
    """A block that no rank calls in some steps."""

    name = "block_skipped_by_chance"
    weight = 0.12

    def build(self, graph: Graph) -> None:
        self.index, self.phase = self.draws.choice(graph.order), self.draws.randrange(3)

    def around(self, graph: Graph, index: int, step: int, call: BlockCall) -> BlockCall:
        skipped = index == self.index and step % 3 == self.phase
        return (lambda x, choice: x) if skipped else call


class SkippedByData(Feature):
    """A block that only some rows go through."""

    name = "block_skipped_by_data"
    weight = 0.12

    def build(self, graph: Graph) -> None:
        self.index = self.draws.choice(graph.order)

    def around(self, graph: Graph, index: int, step: int, call: BlockCall) -> BlockCall:
        return for_even(call) if index == self.index else call


class GradientPenalty(Feature):
    """A penalty on the gradient of a score: of the model's own layers, or through a block."""

    name = "gradient_penalty"

    def build(self, graph: Graph) -> None:
        self.index = self.draws.randrange(len(graph.blocks)) if self.draws.random() < 0.5 else None
        if self.index is None:
            graph.critic = Adapter()

    def penalty(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        scores = graph.critic(x) if self.index is None else call_block(graph.blocks[self.index], x, choice)
        (slope,) = torch.autograd.grad(scores.pow(2).sum(), x, create_graph=True)
        return 0.01 * slope.pow(2).sum()


class Refined(Feature):
    """The hidden state follows the gradient of an energy, which a block or the model's own layer gives."""

    name = "refined_by_gradient"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        self.index = self.draws.randrange(len(graph.blocks)) if self.draws.random() < 0.5 else None
        if self.index is None:
            graph.energy = Adapter()

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        energy = graph.energy(leaf) if self.index is None else call_block(graph.blocks[self.index], leaf, choice)
        (slope,) = torch.autograd.grad(energy.pow(2).sum(), leaf, create_graph=self.index is None)
        return x - 0.05 * slope


class Teacher(Feature):
    """A pass through the same blocks without gradients, whose result the model should also give."""

    name = "teacher_without_gradients"

    def build(self, graph: Graph) -> None:
        self.first = self.draws.random() < 0.5

    def enter(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.target = self._taught(graph, x, choice)
        return x

    def _taught(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for block in graph.blocks:
                x = call_block(block, 0.9 * x, choice)
            return x

    def penalty(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        target = self.target if self.first else self._taught(graph, x.detach(), choice)
        return 0.01 * (x - target).pow(2).sum()


class FrozenTeacher(Feature):
    """A second model that is not trained."""

    name = "frozen_teacher"
    weight = 0.5

    def build(self, graph: Graph) -> None:
        graph.teacher = nn.Sequential(Adapter(), Adapter()).requires_grad_(False)

    def penalty(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = graph.teacher(x)
        return 0.01 * (x - target).pow(2).sum()


class ChangedInPlace(Feature):
    """The model adds to a block's output in place."""

    name = "output_changed_in_place"

    def build(self, graph: Graph) -> None:
        self.indices = set(self.draws.sample(graph.order, self.draws.randint(1, len(graph.order))))

    def after(self, graph: Graph, index: int, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        if index in self.indices:
            x += 0.5 * before
        return x


class ViewChangedInPlace(ChangedInPlace):
    """The same, where the block returns a view of what it computed."""

    name = "view_changed_in_place"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        super().build(graph)
        for block in {id(block): block for block in graph.blocks}.values():
            body = type(block).body
            block.body = lambda x, choice, block=block, body=body: body(block, x, choice)[:, :]


class OwnCheckpoint(Feature):
    """The model recomputes some blocks itself."""

    name = "own_checkpoint"

    def build(self, graph: Graph) -> None:
        self.indices = set(self.draws.sample(graph.order, self.draws.randint(1, len(graph.order))))

    def around(self, graph: Graph, index: int, step: int, call: BlockCall) -> BlockCall:
        if index not in self.indices:
            return call
        return lambda x, choice: checkpoint(call, x, choice, use_reentrant=False)


def of_blocks(block_class: type[Block], name: str, weight: float = 0.5) -> type[Feature]:
    """The feature of blocks that are called in a way of their own."""
    return type(name, (Feature,), {"name": name, "weight": weight, "block_class": block_class})


class Tree(nn.Module):
    """Halves the width's meaning among two children of its own class, down to leaves."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.children_ = nn.ModuleList([Tree(depth - 1) for _ in range(2)] if depth else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        for child in self.children_:
            x = x + 0.5 * child(x)
        return x


class TreeOfModules(Feature):
    """A module that holds and calls modules of its own class."""

    name = "tree"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        graph.tree = Tree(2)

    def leave(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x + graph.tree(x)


FEATURES: list[type[Feature]] = [
    Experts, SharedExpert, TopExperts, Branch, SkippedByChance, SkippedByData, GradientPenalty, Refined, Teacher,
    FrozenTeacher, ChangedInPlace, ViewChangedInPlace, OwnCheckpoint, of_blocks(RecursiveBlock, "recursion", 1.0),
    of_blocks(TupleBlock, "tuples"), of_blocks(DictBlock, "dicts"), of_blocks(DataclassBlock, "dataclasses"),
    of_blocks(KeywordBlock, "keyword_inputs"), TreeOfModules,
]  # fmt: skip
