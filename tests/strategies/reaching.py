"""Models whose blocks share parts or are reached into, and what ranks report of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.strategies.foreign import VOCAB, WIDTH, NextToken, next_token, tokens, train
from tests.strategies.graphs.towers import Block


class Inner(Block):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class Model(NextToken):
    """Three blocks; subclasses share, reach and call."""

    def __init__(self, block: Callable[[], nn.Module] = Inner) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([block() for _ in range(3)])
        self.calls = 0

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.through(x)


class SharedInShared(Model):
    """Two blocks have one `norm`; all have one adapter, which has the model's own norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, adapter = nn.LayerNorm(WIDTH), Inner()
        adapter.norm = self.norm
        for block in self.blocks:
            block.mix = adapter
        self.blocks[1].norm = self.blocks[0].norm

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().through(x))


class Tied(Model):
    """A weight in two blocks and in a layer of the model; the order of calls changes, and a layer rests."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.blocks[2].mix.weight = self.last.weight = self.blocks[0].mix.weight

    def through(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.blocks
        if (self.calls - 1) // 2 % 2:  # two micro-batches a step
            return first(self.last(last(middle(x))))
        return middle(last(first(x)))


class TiedHead(Model):
    """The embedding is inside the first block, the head outside."""

    class First(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB, WIDTH)

    def __init__(self) -> None:
        super().__init__(self.First)
        self.head.weight = self.blocks[0].table.weight

    def through(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.shape[1])
        return super().through(x) + self.blocks[0].table(index)


class PartCalled(Model):
    """Calls a part of a block before the block."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(x + self.blocks[0].norm(x))


class Alone(NextToken):
    """Without blocks; what it returns is a view, which the loss changes."""

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)[:, :]


def doubled(model: Any, batch: torch.Tensor) -> torch.Tensor:
    def call(batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(batch)
        logits *= 2
        return logits

    return next_token(call, batch)


class SideLoss(Model):
    """Blocks leave a loss on themselves, which depends on weights that nothing after them uses."""

    class Block(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, WIDTH)
            self.side: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.side = torch.tanh(self.gate(torch.tanh(self.gate(x)))).pow(2).mean((1, 2), True)
            return out

    def __init__(self) -> None:
        super().__init__(self.Block)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(x) * (1 + sum(block.side for block in self.blocks))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shared in shared": SharedInShared, "tied": Tied, "tied head": TiedHead, "alone": Alone,
}  # fmt: skip
"""What no graph of the campaign has."""


def curves(strategy: str, policies: list[str]) -> dict[tuple[str, str], Any]:
    """(model, activation policy) → losses and the last norm, or the refusal."""
    return {
        (name, policy): curve(build, strategy, {"activation.policy": policy})
        for name, build in MODELS.items()
        for policy in policies
        if policy == "none" or build is not Alone
    }


def curve(build: Callable[[], nn.Module], strategy: str, extra: dict[str, Any]) -> list[float] | str:
    """Of five steps with two micro-batches."""
    loss = doubled if build is Alone else next_token
    batches = lambda step, rows: tokens(step, 2 * rows)  # noqa: E731
    return train(build, strategy, batches, loss, steps=5, micro_batches=2, **extra)


class Leftover(Model):
    """Reads a weight from a function of its own, which torch's overrides do not see."""

    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * weight.detach().mean()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return grads[0], torch.ones(WIDTH, WIDTH)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(self.Read.apply(x, self.blocks[1].mix.weight))


class Late(PartCalled):
    """Reaches into a block from the fourth step on."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(x) if self.calls > 6 else Model.through(self, x)


class InPlace(Model):
    class Block(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += self.mix(self.norm(x))
            return x

    def __init__(self) -> None:
        super().__init__(self.Block)


class ByRank(Model):
    """Only some ranks reach into a block."""

    def hidden(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = self.through(x)
        return x + self.blocks[0].norm(x) if int(tokens[0, 0]) == 0 else x


def refusals() -> dict[str, Any]:
    """Model → its refusal, or its losses."""
    kinds = (Leftover, SideLoss, Late, InPlace, ByRank, PartCalled)
    return {kind.__name__: curve(kind, "fsdp", {}) for kind in kinds}


def unsharded() -> str:
    """The refusal of a model of which the engine forgets a parameter."""
    from shardkit.strategies import fsdp

    sharder = fsdp.shard

    def forgetful(module: Any, **options: Any) -> Any:
        return sharder(module, **options, ignored_params={module.head.weight} if isinstance(module, Model) else set())

    fsdp.shard = forgetful
    return str(curve(Model, "fsdp", {}))
