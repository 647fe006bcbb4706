"""Frozen linear layers whose weights are stored in 4 bits, in blocks along their rows (QLoRA, Dettmers et al. 2023).

Packed weights and their scales are parameters of bytes, [out, …], so that engines shard, gather and free them by rows
as they do other parameters; nothing casts bytes. bitsandbytes packs and unpacks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..config.schema import QuantizeConfig

PACKED, SCALES, NESTED = "packed", "absmax", "nested"
"""Names of a layer's parameters: two weights a byte; the bytes of each block's fp32 scale, or with double quantisation
one byte a block; the fp32 numbers, four bytes a row, that make scales of those bytes."""
_SCALE_BYTES = 4
NESTED_BLOCK, _LEVELS = 256, 256
"""Scales that share a scale of their own, and the numbers that a scale's byte stands for: bitsandbytes' own."""


def is_packed(fqn: str) -> bool:
    """Whether a parameter belongs to a packed layer's weight."""
    return fqn.rpartition(".")[2] in (PACKED, SCALES, NESTED)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a packed weight, which forward and backward unpack into the compute type.

    It is a subclass of `nn.Linear` so that peft adapts it as one.

    Args:
        linear: the layer that it replaces; its bias is taken over.
    """

    def __init__(self, linear: nn.Linear, settings: QuantizeConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind, self.block_size, self.doubled = settings.type, settings.block_size, settings.double
        for name, shape in packed_shapes(linear.out_features, linear.in_features, settings).items():
            packed = torch.empty(shape, dtype=torch.uint8)
            self.register_parameter(name, nn.Parameter(packed, requires_grad=False))
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The packed bytes: peft looks at the weight's device and whether it is sharded."""
        packed: torch.Tensor = self.packed  # type: ignore[assignment]
        return packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = [self.absmax, self.nested] if self.doubled else [self.absmax]
        product: torch.Tensor = _Product.apply(input.to(compute_dtype(input)), self.bias, self, self.packed, *state)  # type: ignore[no-untyped-call]
        return product

    def unpacked(self, dtype: torch.dtype, packed: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] in a type."""
        scales = scales_of(*state) if self.doubled else state[0].view(torch.float32).view(-1)
        weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            packed, scales, self.block_size, self.kind, (self.out_features, self.in_features), dtype
        )
        return weight


def compute_dtype(input: torch.Tensor) -> torch.dtype:
    """The type in which a product with the input is computed."""
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def packed_shapes(rows: int, columns: int, settings: QuantizeConfig) -> dict[str, tuple[int, int]]:
    """The shapes of a packed layer's parameters, in bytes."""
    n_scales = columns // settings.block_size
    if not settings.double:
        return {PACKED: (rows, columns // 2), SCALES: (rows, n_scales * _SCALE_BYTES)}
    n_numbers = -(-rows * n_scales // NESTED_BLOCK) + 1 + _LEVELS
    return {PACKED: (rows, columns // 2), SCALES: (rows, n_scales), NESTED: (n_numbers, _SCALE_BYTES)}


def scales_of(absmax: torch.Tensor, nested: torch.Tensor, *, first_block: int = 0) -> torch.Tensor:
    """The blocks' scales in fp32, 1-D, from a byte each and the numbers of `BaseQuantizer.state`.

    Args:
        absmax: bytes of the whole layer, or of whole blocks of 256 scales.
        first_block: the first of these blocks.
    """
    numbers = nested.view(torch.float32).view(-1)
    block_scales, mean, levels = torch.split(numbers, [numbers.numel() - 1 - _LEVELS, 1, _LEVELS])
    of_bytes = block_scales[first_block : first_block - (-absmax.numel() // NESTED_BLOCK)]
    scales: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        absmax.view(-1), of_bytes, levels, NESTED_BLOCK, torch.float32
    )
    return scales.add_(mean)


class _Product(torch.autograd.Function):
    """input · weightᵀ + bias; backward unpacks the weight again, so that only packed bytes wait for it."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, bias: torch.Tensor | None, layer: QuantizedLinear, *packed: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*packed)
        ctx.layer = layer
        weight = layer.unpacked(input.dtype, *packed)
        return F.linear(input, weight, None if bias is None else bias.to(input.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        packed = ctx.saved_tensors  # read once: a checkpoint recomputes at each look
        weight = ctx.layer.unpacked(grad.dtype, *packed)
        return grad @ weight, None, None, *(None for _ in packed)
