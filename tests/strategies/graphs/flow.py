"""Features of graphs whose forward does more than call one layer after the other."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .model import (
    FEATURES,
    WIDTH,
    BlockCall,
    DataclassBlock,
    DictBlock,
    Feature,
    Graph,
    KeywordBlock,
    RecursiveBlock,
    TupleBlock,
    feature,
)
from .sharing import Adapter


def by_expert(experts: nn.ModuleList, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Adds what each row's expert makes of it; experts without a row are not called."""
    out = hidden.clone()
    for index in (choice % len(experts)).unique().tolist():
        rows = choice % len(experts) == index
        out[rows] = hidden[rows] + experts[index](hidden[rows])
    return out


@feature()
def experts(graph: Graph, draws: Random, shared: bool = False) -> None:
    """Lists of experts in blocks, of which each row uses one."""
    number, first = draws.randint(2, 4), Adapter()
    for block in graph.some_blocks(draws, at_least=2 if shared else 1):
        block.experts = nn.ModuleList([Adapter() for _ in range(number)])
        if shared:
            block.experts[0] = first
        block.extras.append(lambda block, hidden, choice: by_expert(block.experts, hidden, choice))


@feature(weight=0.5)
def shared_expert(graph: Graph, draws: Random) -> None:
    """Blocks with experts of their own and one that is the same in all of them."""
    experts(graph, draws, shared=True)


@feature(weight=0.5)
def top_experts(graph: Graph, draws: Random) -> None:
    """A list of experts that the model itself calls."""
    graph.experts = nn.ModuleList([Adapter() for _ in range(draws.randint(2, 4))])
    graph.leaves.append(lambda x, choice: by_expert(graph.experts, x, choice))


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


@feature(weight=0.25)
def branch_by_data(graph: Graph, draws: Random) -> None:
    """A part of a block that a micro-batch may not need."""
    for block in graph.some_blocks(draws):
        block.branch = Adapter()
        block.extras.append(branched)


@feature(weight=0.12)
def block_skipped_by_chance(graph: Graph, draws: Random) -> None:
    """A block that no rank calls in some steps."""
    skipped, phase = draws.choice(graph.order), draws.randrange(3)
    graph.arounds.append(
        lambda index, step, call: (lambda x, choice: x) if index == skipped and step % 3 == phase else call
    )


@feature(weight=0.12)
def block_skipped_by_data(graph: Graph, draws: Random) -> None:
    """A block that only some rows go through."""
    skipped = draws.choice(graph.order)
    graph.arounds.append(lambda index, step, call: for_even(call) if index == skipped else call)


@feature()
def gradient_penalty(graph: Graph, draws: Random) -> None:
    """A penalty on the gradient of a score: of the model's own layers, or through a block."""
    index = draws.randrange(len(graph.blocks)) if draws.random() < 0.5 else None
    if index is None:
        graph.critic = Adapter()

    def penalty(x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        scores = graph.critic(x) if index is None else graph.blocks[index].call(x, choice)
        (slope,) = torch.autograd.grad(scores.pow(2).sum(), x, create_graph=True)
        return 0.01 * slope.pow(2).sum()

    graph.penalties.append(penalty)


@feature(weight=0.7)
def refined_by_gradient(graph: Graph, draws: Random) -> None:
    """The hidden state follows the gradient of an energy, which a block or the model's own layer gives."""
    index = draws.randrange(len(graph.blocks)) if draws.random() < 0.5 else None
    if index is None:
        graph.energy = Adapter()

    def leave(x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        energy = graph.energy(leaf) if index is None else graph.blocks[index].call(leaf, choice)
        (slope,) = torch.autograd.grad(energy.pow(2).sum(), leaf, create_graph=index is None)
        return x - 0.05 * slope

    graph.leaves.append(leave)


@feature()
def teacher_without_gradients(graph: Graph, draws: Random) -> None:
    """A pass through the same blocks without gradients, whose result the model should also give."""
    taught: list[torch.Tensor] = []

    def teach(x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        given = x.detach()
        with torch.no_grad():
            for block in graph.blocks:
                given = block.call(0.9 * given, choice)
        taught[:] = [given]
        return x

    if first := draws.random() < 0.5:
        graph.enters.append(teach)

    def penalty(x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        if not first:
            teach(x, choice)
        return 0.01 * (x - taught[0]).pow(2).sum()

    graph.penalties.append(penalty)


@feature(weight=0.5)
def frozen_teacher(graph: Graph, draws: Random) -> None:
    """A second model that is not trained."""
    graph.teacher = nn.Sequential(Adapter(), Adapter()).requires_grad_(False)

    def penalty(x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = graph.teacher(x)
        return 0.01 * (x - target).pow(2).sum()

    graph.penalties.append(penalty)


@feature()
def output_changed_in_place(graph: Graph, draws: Random) -> None:
    """The model adds to a block's output in place."""
    changed = set(draws.sample(graph.order, draws.randint(1, len(graph.order))))
    graph.afters.append(lambda index, x, before: x.add_(0.5 * before) if index in changed else x)


@feature(weight=0.7)
def view_changed_in_place(graph: Graph, draws: Random) -> None:
    """The same, where the block returns a view of what it computed."""
    output_changed_in_place(graph, draws)
    for block in {id(block): block for block in graph.blocks}.values():
        body = type(block).body
        block.body = lambda x, choice, block=block, body=body: body(block, x, choice)[:, :]


@feature()
def own_checkpoint(graph: Graph, draws: Random) -> None:
    """The model recomputes some blocks itself."""
    chosen = set(draws.sample(graph.order, draws.randint(1, len(graph.order))))

    def around(index: int, step: int, call: BlockCall) -> BlockCall:
        return (lambda x, choice: checkpoint(call, x, choice, use_reentrant=False)) if index in chosen else call

    graph.arounds.append(around)


FEATURES |= {
    "recursion": Feature(lambda *_: None, block_class=RecursiveBlock),
    "tuples": Feature(lambda *_: None, 0.5, TupleBlock),
    "dicts": Feature(lambda *_: None, 0.5, DictBlock),
    "dataclasses": Feature(lambda *_: None, 0.5, DataclassBlock),
    "keyword_inputs": Feature(lambda *_: None, 0.5, KeywordBlock),
}
"""Blocks that are called in a way of their own."""


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


@feature(weight=0.7)
def tree(graph: Graph, draws: Random) -> None:
    """A module that holds and calls modules of its own class."""
    graph.tree = Tree(2)
    graph.leaves.append(lambda x, choice: x + graph.tree(x))
