"""Frozen experts that a transformers module holds as 3-D parameters, [experts, out, in], kept in 4 bits.

A packed weight is a matrix of [experts · out, in], so that its blocks, which lie along rows, never cross an expert.
Experts are unpacked one at a time. Only the weights change: routing, activations and gates are the model's own. LoRA
gives each expert a product of its own beside its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..config.schema import AdapterConfig, QuantizeConfig
from ..errors import ConfigError
from ..parallel.blocks import OTHER_EXPERTS
from ..parallel.compat import gated, has_values
from .quantized import NESTED_BLOCK, compute_dtype, packed_shapes, scales_of

WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the parameters that such a module holds."""


def stacked_weights(reference: nn.Module) -> list[str]:
    """Names of the experts' 3-D parameters in a transformers model.

    Raises:
        ConfigError: the model has none, or its experts are computed otherwise.
    """
    names = []
    for prefix, module in reference.named_modules():
        stacked = [name for name, param in module.named_parameters(recurse=False) if param.dim() == 3]
        if not stacked or not getattr(module, "has_gate", False):
            continue
        others = [words for fact, words in OTHER_EXPERTS.items() if getattr(module, fact, False)]
        if others or sorted(stacked) != sorted(WEIGHTS):
            others = others or [f"holds {', '.join(stacked)}"]
            raise ConfigError(
                f"model.quantize.experts=true: {prefix} ({type(module).__name__}) {' and '.join(others)}, and such "
                "experts are not packed here",
                "remove experts from model.quantize: they keep their type",
            )
        names += [f"{prefix}.{name}" for name in WEIGHTS]
    if not names:
        raise ConfigError(
            f"model.quantize.experts=true, but {type(reference).__name__} has no experts that are 3-D parameters",
            "remove experts: linear layers are packed without it",
        )
    return names


class PackedWeight(nn.Module):
    """One weight of all experts, packed; the module of the experts multiplies by it.

    Args:
        shape: (experts, out, in) of the parameter that it replaces.
    """

    def __init__(self, shape: torch.Size, settings: QuantizeConfig) -> None:
        super().__init__()
        self.n_experts, self.out_features, self.in_features = shape
        self.kind, self.block_size, self.doubled = settings.type, settings.block_size, settings.double
        for name, in_bytes in packed_shapes(self.n_experts * self.out_features, self.in_features, settings).items():
            self.register_parameter(name, nn.Parameter(torch.empty(in_bytes, dtype=torch.uint8), requires_grad=False))
        self.adapter: AdapterConfig | None = None

    def adapt(self, settings: AdapterConfig) -> None:
        """Add LoRA for each expert: A [experts, r, in] and B [experts, out, r], without values and trained."""
        self.adapter = settings
        self.lora_A = _Factors(self.n_experts, settings.r, self.in_features)
        self.lora_B = _Factors(self.n_experts, self.out_features, settings.r)

    def product(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Each row times the transposed weight of its expert, with the expert's LoRA if there is one.

        Args:
            rows: [n, in], sorted by expert.
            counts: rows of each expert; their sum is n.

        Returns:
            [n, out], in the compute type.
        """
        state = [self.absmax, self.nested] if self.doubled else [self.absmax]
        product: torch.Tensor = _Products.apply(rows.to(compute_dtype(rows)), self, counts, self.packed, *state)  # type: ignore[no-untyped-call]
        return product if self.adapter is None else product + self._low_rank_product(rows, counts).to(product.dtype)

    def _low_rank_product(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Each row times B·A of its expert, scaled: [n, in] to [n, out]. Arguments as for `product`."""
        assert self.adapter is not None
        a, b = self.lora_A(), self.lora_B()
        rows = F.dropout(rows.to(a.dtype), self.adapter.dropout, self.training)
        # Backward of a split and of unbind joins the parts once; that of a slice fills a whole tensor for each expert.
        experts = zip(torch.split(rows, counts), a.unbind(), b.unbind(), strict=True)
        products = [F.linear(F.linear(part, a_one), b_one) for part, a_one, b_one in experts if len(part)]
        return torch.cat(products) * self.adapter.scaling

    def unpacked(self, expert: int, dtype: torch.dtype, packed: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] of an expert."""
        first, end = expert * self.out_features, (expert + 1) * self.out_features
        scales = self._scales(first, end, *state)
        weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            packed[first:end], scales, self.block_size, self.kind, (self.out_features, self.in_features), dtype
        )
        return weight

    def _scales(self, first: int, end: int, absmax: torch.Tensor, nested: torch.Tensor | None = None) -> torch.Tensor:
        """The blocks' fp32 scales of rows first to end - 1, 1-D."""
        if nested is None:
            return absmax[first:end].view(torch.float32).view(-1)
        a_row = self.in_features // self.block_size
        if first * a_row % NESTED_BLOCK or end * a_row % NESTED_BLOCK:  # experts share a block of scales
            return scales_of(absmax, nested)[first * a_row : end * a_row]
        return scales_of(absmax[first:end], nested, first_block=first * a_row // NESTED_BLOCK)


class _Factors(nn.ModuleDict):
    """A or B of all experts, under the name that peft's factors have: `default.weight`."""

    def __init__(self, *shape: int) -> None:
        holder = nn.Module()
        holder.register_parameter("weight", nn.Parameter(torch.empty(shape)))
        super().__init__({"default": holder})

    def forward(self) -> torch.Tensor:
        return self["default"].get_parameter("weight")


class _Products(torch.autograd.Function):
    """Rows times the transposed weights of their experts; backward unpacks the weights again."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: PackedWeight, counts: list[int], *packed: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*packed)
        ctx.weight, ctx.counts = weight, counts
        out = rows.new_empty(rows.shape[0], weight.out_features)
        for expert, span in _spans(counts):
            torch.mm(rows[span], weight.unpacked(expert, rows.dtype, *packed).t(), out=out[span])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        packed = ctx.saved_tensors  # read once: a checkpoint recomputes at each look
        out = grad.new_empty(grad.shape[0], ctx.weight.in_features)
        for expert, span in _spans(ctx.counts):
            torch.mm(grad[span], ctx.weight.unpacked(expert, grad.dtype, *packed), out=out[span])
        return out, None, None, *(None for _ in packed)


def _spans(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and where they are."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def pack_experts(experts: nn.Module, settings: QuantizeConfig) -> None:
    """Replace the 3-D parameters of a module of experts by packed ones without values, in place."""
    for name in WEIGHTS:
        shape = experts.get_parameter(name).shape
        delattr(experts, name)
        experts.add_module(name, PackedWeight(shape, settings))
    experts.forward = MethodType(_forward, experts)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The sum over each token's experts of weight · down(gate(up(token)))."""
    n_tokens, top_k = top_k_index.shape
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = _rows_of_experts(chosen, self.gate_up_proj.n_experts)
    between = gated(self, self.gate_up_proj.product(hidden_states[order // top_k], counts))
    weighted = self.down_proj.product(between, counts) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    total: torch.Tensor = weighted[back].view(n_tokens, top_k, -1).sum(dim=1)
    return total.to(hidden_states.dtype)


def _rows_of_experts(chosen: torch.Tensor, n_experts: int) -> list[int]:
    """The number of rows of each expert; as even as can be where planning has no values."""
    if has_values(chosen):
        counts: list[int] = torch.bincount(chosen, minlength=n_experts).tolist()
        return counts
    share, more = divmod(math.prod(chosen.shape), n_experts)
    return [share + (expert < more) for expert in range(n_experts)]
