"""Features of single layers: frozen, parametrized, hooked, with buffers that forward changes, of other kinds."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import parametrizations

from .model import WIDTH, Convolution, Feature, Graph, Recurrence


class Frozen(Feature):
    """The embedding, a whole block, or one layer of each block is not trained."""

    name = "frozen"

    def build(self, graph: Graph) -> None:
        match self.draws.randrange(3):
            case 0:
                graph.embed.requires_grad_(False)
            case 1:
                graph.blocks[self.draws.randrange(len(graph.blocks))].requires_grad_(False)
            case 2:
                for block in graph.blocks:
                    block.norm.requires_grad_(False)


class Stem(Feature):
    """A layer before the first block."""

    weight = 0.5
    layer: ClassVar[type[nn.Module]]

    def build(self, graph: Graph) -> None:
        graph.stem = self.layer()

    def enter(self, graph: Graph, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return x + graph.stem(x)


class ConvolutionStem(Stem):
    name = "convolution_stem"
    layer = Convolution


class RecurrentStem(Stem):
    name = "recurrent_stem"
    layer = Recurrence


def counted(block: Any, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    return hidden * (1 + 0.02 * block.calls)


def averaged(block: Any, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    block.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
    return hidden


class CountingBuffer(Feature):
    """Blocks count their calls in a buffer and use the number."""

    name = "counting_buffer"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        for block in graph.some_blocks(self.draws):
            block.register_buffer("calls", torch.zeros(()))
            block.extras.append(counted)


class AveragingBuffer(Feature):
    """Blocks note a moving average of what they saw, each rank its own, for later."""

    name = "averaging_buffer"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        for block in graph.some_blocks(self.draws):
            block.register_buffer("mean", torch.zeros(WIDTH))
            block.extras.append(averaged)


class WeightNorm(Feature):
    """A parametrization of torch on two blocks."""

    name = "weight_norm"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        for block in graph.claim(self.draws, 2):
            getattr(parametrizations, self.name)(block.mix)


class Orthogonal(WeightNorm):
    name = "orthogonal"


class SpectralNorm(WeightNorm):
    name = "spectral_norm"


class NonContiguous(Feature):
    """Weights that are a transposed view of their memory."""

    name = "non_contiguous"

    def build(self, graph: Graph) -> None:
        for block in graph.claim(self.draws, 2):
            block.mix.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) / WIDTH).t())


def scaled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return 1.1 * out


def shifted(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0] + 0.1, *args[1:])


def halved(module: nn.Module, grad_input: tuple[Any, ...], grad_output: Any) -> tuple[Any, ...]:
    return tuple(None if grad is None else 0.5 * grad for grad in grad_input)


class ForwardHooks(Feature):
    """Hooks that change what goes into a layer of a block and what comes out."""

    name = "forward_hooks"

    def build(self, graph: Graph) -> None:
        for block in graph.some_blocks(self.draws):
            block.core.register_forward_pre_hook(shifted)
            block.mix.register_forward_hook(scaled)


class BackwardHook(Feature):
    """Hooks that change the gradient of a layer's input."""

    name = "backward_hook"
    weight = 0.7

    def build(self, graph: Graph) -> None:
        for block in graph.some_blocks(self.draws):
            block.mix.register_full_backward_hook(halved)


class ParameterHook(Feature):
    """A hook that changes the gradient of a parameter."""

    name = "parameter_hook"
    weight = 0.5

    def build(self, graph: Graph) -> None:
        for holder in [graph.head, *(block.norm for block in graph.some_blocks(self.draws))]:
            if holder.weight.requires_grad:  # another feature may have frozen the block
                holder.weight.register_hook(lambda grad: 0.5 * grad)


FEATURES: list[type[Feature]] = [
    Frozen, ConvolutionStem, RecurrentStem, CountingBuffer, AveragingBuffer, WeightNorm, Orthogonal, SpectralNorm,
    NonContiguous, ForwardHooks, BackwardHook, ParameterHook,
]  # fmt: skip
