"""A next-token model of a few blocks, and the features that a seed adds to it.

A seed alone names a graph. What a feature draws depends on the seed and the feature's name, so a graph can be built
again with fewer features: that is how the ones at fault are found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCAB, LENGTH = 16, 32, 8
BlockCall = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden [rows, LENGTH, WIDTH], choice [rows]) → hidden: a block, or what a feature puts around it."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fall(F.gelu(self.rise(x)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x)[0]


CORES: dict[str, type[nn.Module]] = {"mlp": Mlp, "attention": SelfAttention, "conv": Convolution, "gru": Recurrence}


@dataclass
class State:
    """What blocks pass on in graphs whose blocks take one object."""

    hidden: torch.Tensor
    choice: torch.Tensor


class Block(nn.Module):
    """Takes and returns tensors; subclasses take and return them otherwise."""

    def __init__(self, core: str) -> None:
        super().__init__()
        self.norm, self.core, self.mix = nn.LayerNorm(WIDTH), CORES[core](), nn.Linear(WIDTH, WIDTH)
        self.extras: list[Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = []
        """Functions (block, hidden, choice) → hidden that features add to the block's forward."""

    def body(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.core(self.norm(x)))
        for extra in self.extras:
            hidden = extra(self, hidden, choice)
        return x + hidden

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """A method beside forward that uses a part of the block."""
        return torch.tanh(self.mix(x))

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return self.body(x, choice)

    def call(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """How a graph calls its blocks of this class."""
        return self(x, choice)


class TupleBlock(Block):
    def forward(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(*state), state[1]

    def call(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return self((x, choice))[0]


class DictBlock(Block):
    def forward(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return state | {"hidden": self.body(state["hidden"], state["choice"])}

    def call(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return self({"hidden": x, "choice": choice})["hidden"]


class DataclassBlock(Block):
    def forward(self, state: State) -> State:
        return State(self.body(state.hidden, state.choice), state.choice)

    def call(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return self(State(x, choice)).hidden


class KeywordBlock(Block):
    def forward(self, *, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return self.body(hidden, choice)

    def call(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return self(hidden=x, choice=choice)


class RecursiveBlock(Block):
    def forward(self, x: torch.Tensor, choice: torch.Tensor, depth: int = 1) -> torch.Tensor:
        x = self.body(x, choice)
        return self(x, choice, depth - 1) if depth else x


Build = Callable[["Graph", random.Random], None]


@dataclass(frozen=True)
class Feature:
    """One thing that a graph does.

    Attributes:
        build: draws what it chose at random, adds modules, and the functions that act in the graph's forward.
        weight: how often it is drawn, relative to the others.
    """

    build: Build
    weight: float = 1.0
    block_class: type[Block] = Block


FEATURES: dict[str, Feature] = {}
"""By name: the functions that `feature` marks."""


def feature(weight: float = 1.0) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        FEATURES[build.__name__] = Feature(build, weight)
        return build

    return register


class Graph(nn.Module):
    """Embedding, blocks, norm and head, with features in between.

    Attributes:
        order: the blocks that are called, in turn.
        untouched: blocks whose `mix.weight` no feature has replaced yet.
        enters, leaves: before the first block and after the last one: (hidden, choice) → hidden.
        arounds: around the call of a block: (its index, step, call) → call.
        afters: with the output of a block, and what went into it: (its index, output, input) → output.
        penalties: second losses, summed over rows: (hidden, choice) → loss.
    """

    def __init__(self, core: str, n_blocks: int, features: Sequence[tuple[Feature, random.Random]]) -> None:
        super().__init__()
        kinds = {feature.block_class for feature, _ in features} - {Block} or {Block}
        kind = min(kinds, key=lambda candidate: candidate.__name__)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList([kind(core) for _ in range(n_blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.order, self.untouched = list(range(n_blocks)), list(range(n_blocks))
        self.enters, self.leaves, self.arounds, self.afters, self.penalties = ([] for _ in range(5))
        for feature, draws in features:
            feature.build(self, draws)

    def claim(self, draws: random.Random, number: int = 1) -> list[Any]:
        """Blocks whose `mix.weight` a feature may replace: at most `number`, and none twice."""
        indices = sorted(draws.sample(self.untouched, min(number, len(self.untouched))))
        self.untouched = [index for index in self.untouched if index not in indices]
        return [self.blocks[index] for index in indices]

    def some_blocks(self, draws: random.Random, at_least: int = 1) -> list[Any]:
        number = draws.randint(min(at_least, len(self.blocks)), len(self.blocks))
        return [self.blocks[index] for index in sorted(draws.sample(range(len(self.blocks)), number))]

    def through(self, x: torch.Tensor, choice: torch.Tensor, step: int) -> torch.Tensor:
        """All blocks in order."""
        for index in self.order:
            call: BlockCall = self.blocks[index].call
            for around in self.arounds:
                call = around(index, step, call)
            before, x = x, call(x, choice)
            for after in self.afters:
                x = after(index, x, before)
        return x

    def forward(self, tokens: torch.Tensor, choice: torch.Tensor, *, step: int) -> dict[str, torch.Tensor]:
        """Tokens [rows, LENGTH] and a number for each row [rows] → logits [rows, LENGTH, VOCAB] and a penalty []."""
        x = self.embed(tokens)
        for enter in self.enters:
            x = enter(x, choice)
        x = self.through(x, choice, step)
        for leave in self.leaves:
            x = leave(x, choice)
        penalties = [penalty(x, choice) for penalty in self.penalties]
        logits = self.head(self.norm(x))
        return {"logits": logits, "penalty": sum(penalties, logits.new_zeros(()))}
