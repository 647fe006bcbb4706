"""Features of single layers: frozen, parametrized, hooked, with buffers that forward changes, of other kinds."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from .model import WIDTH, Convolution, Graph, Recurrence, feature


@feature()
def frozen(graph: Graph, draws: Random) -> None:
    """The embedding, a whole block, or one layer of each block is not trained."""
    match draws.randrange(3):
        case 0:
            graph.embed.requires_grad_(False)
        case 1:
            graph.blocks[draws.randrange(len(graph.blocks))].requires_grad_(False)
        case 2:
            for block in graph.blocks:
                block.norm.requires_grad_(False)


def begin(graph: Graph, layer: nn.Module) -> None:
    """A layer before the first block."""
    graph.stem = layer
    graph.enters.append(lambda x, choice: x + graph.stem(x))


@feature(weight=0.5)
def convolution_stem(graph: Graph, draws: Random) -> None:
    begin(graph, Convolution())


@feature(weight=0.5)
def recurrent_stem(graph: Graph, draws: Random) -> None:
    begin(graph, Recurrence())


def counted(block: Any, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    return hidden * (1 + 0.02 * block.calls)


def averaged(block: Any, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    block.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
    return hidden


@feature(weight=0.7)
def counting_buffer(graph: Graph, draws: Random) -> None:
    """Blocks count their calls in a buffer and use the number."""
    for block in graph.some_blocks(draws):
        block.register_buffer("calls", torch.zeros(()))
        block.extras.append(counted)


@feature(weight=0.7)
def averaging_buffer(graph: Graph, draws: Random) -> None:
    """Blocks note a moving average of what they saw, each rank its own, for later."""
    for block in graph.some_blocks(draws):
        block.register_buffer("mean", torch.zeros(WIDTH))
        block.extras.append(averaged)


def parametrize(name: str) -> None:
    """The feature of torch's parametrization of this name, on two blocks."""

    def build(graph: Graph, draws: Random) -> None:
        for block in graph.claim(draws, 2):
            getattr(parametrizations, name)(block.mix)

    build.__name__ = name
    feature(weight=0.7)(build)


for name in ("weight_norm", "orthogonal", "spectral_norm"):
    parametrize(name)


@feature()
def non_contiguous(graph: Graph, draws: Random) -> None:
    """Weights that are a transposed view of their memory."""
    for block in graph.claim(draws, 2):
        block.mix.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) / WIDTH).t())


@feature()
def forward_hooks(graph: Graph, draws: Random) -> None:
    """Hooks that change what goes into a layer of a block and what comes out."""
    for block in graph.some_blocks(draws):
        block.core.register_forward_pre_hook(lambda module, args: (args[0] + 0.1, *args[1:]))
        block.mix.register_forward_hook(lambda module, args, out: 1.1 * out)


def halved(module: nn.Module, grad_input: tuple[Any, ...], grad_output: Any) -> tuple[Any, ...]:
    return tuple(None if grad is None else 0.5 * grad for grad in grad_input)


@feature(weight=0.7)
def backward_hook(graph: Graph, draws: Random) -> None:
    """Hooks that change the gradient of a layer's input."""
    for block in graph.some_blocks(draws):
        block.mix.register_full_backward_hook(halved)


@feature(weight=0.5)
def parameter_hook(graph: Graph, draws: Random) -> None:
    """A hook that changes the gradient of a parameter."""
    for holder in [graph.head, *(block.norm for block in graph.some_blocks(draws))]:
        if holder.weight.requires_grad:  # another feature may have frozen the block
            holder.weight.register_hook(lambda grad: 0.5 * grad)
