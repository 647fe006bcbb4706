"""Frozen layers and experts whose weights are stored in 4 bits, in blocks along their rows, and the choice of them.

QLoRA (Dettmers et al. 2023). Packed weights and their scales are parameters of bytes, [out, …], so that engines shard,
gather and free them by rows as they do other parameters; nothing casts bytes. bitsandbytes packs and unpacks.

Experts that a transformers module holds as 3-D parameters, [experts, out, in], become a matrix of [experts · out, in],
so that blocks never cross an expert. They are unpacked one at a time. Only the weights change: routing, activations and
gates are the model's own. LoRA gives each expert a product of its own beside its weight.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..config.schema import AdapterConfig, QuantizeConfig
from ..errors import ConfigError
from ..parallel.blocks import OTHER_EXPERTS
from ..parallel.compat import gated, has_values

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
    """A frozen linear layer with a packed weight, which forward and backward unpack into the compute type. It is a
    subclass of `nn.Linear` so that peft adapts it as one. It takes the bias of `linear` over."""

    per_layer = (NESTED,)  # parameters without rows of the weight

    def __init__(self, linear: nn.Linear, settings: QuantizeConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind, self.block_size, self.doubled = settings.type, settings.block_size, settings.double
        for name, shape in packed_shapes(linear.out_features, linear.in_features, settings).items():
            packed = torch.empty(shape, dtype=torch.uint8)
            self.register_parameter(name, nn.Parameter(packed, requires_grad=False))
        self.register_parameter("bias", linear.bias)
        self._places: tuple[int, int, int] | None = None
        """Of a part of the weight, its first row and block in a row, and the blocks of a whole row."""

    def take_part(self, dim: int, rank: int, size: int) -> None:
        """Go on with one of `size` parts of the rows (`dim` 0) or columns, which the parameters have then."""
        a_row = self.in_features // self.block_size
        if dim == 0:
            self.out_features //= size
            self._places = rank * self.out_features, 0, a_row
        else:
            self.in_features //= size
            self._places = 0, rank * (a_row // size), a_row

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The packed bytes: peft looks at the weight's device and whether it is sharded."""
        packed: torch.Tensor = self.packed  # type: ignore[assignment]
        return packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input, self.bias)

    def product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        state = [self.absmax, self.nested] if self.doubled else [self.absmax]
        product: torch.Tensor = _Product.apply(input.to(compute_dtype(input)), bias, self, self.packed, *state)  # type: ignore[no-untyped-call]
        return product

    def unpacked(self, dtype: torch.dtype, packed: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] in a type."""
        if not self.doubled:
            scales = state[0].view(torch.float32).view(-1)
        elif self._places is None:
            scales = scales_of(*state)
        else:
            scales = _scales_at(state[0], state[1], *self._places)
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
    """The blocks' scales in fp32, 1-D, from a byte each and the numbers of `BaseQuantizer.state`. `absmax`: bytes of
    the whole layer, or those from the beginning of a block of 256 on. `first_block`: this block."""
    numbers = nested.view(torch.float32).view(-1)
    block_scales, mean, levels = torch.split(numbers, [numbers.numel() - 1 - _LEVELS, 1, _LEVELS])
    of_bytes = block_scales[first_block : first_block - (-absmax.numel() // NESTED_BLOCK)]
    scales: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        absmax.view(-1), of_bytes, levels, NESTED_BLOCK, torch.float32
    )
    return scales.add_(mean)


def _scales_at(
    absmax: torch.Tensor, nested: torch.Tensor, first_row: int, first_block: int, a_row: int
) -> torch.Tensor:
    """`scales_of` a part of a layer, whose blocks of 256 scales begin anywhere in it."""
    numbers = nested.view(torch.float32).view(-1)
    block_scales, mean, levels = torch.split(numbers, [numbers.numel() - 1 - _LEVELS, 1, _LEVELS])
    rows, columns = (torch.arange(n, device=absmax.device) for n in absmax.shape)
    at = (first_row + rows)[:, None] * a_row + first_block + columns
    return (levels[absmax.long()] * block_scales[at // NESTED_BLOCK] + mean).view(-1)


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


WEIGHTS = ("gate_up_proj", "down_proj")
"""Names of the parameters that such a module holds."""


def stacked_weights(reference: nn.Module) -> list[str]:
    """Names of the experts' 3-D parameters in a transformers model."""
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
    """One weight of all experts, packed, in place of a parameter [experts, out, in]; the experts multiply by it."""

    per_layer = (NESTED,)  # parameters without rows of experts

    def __init__(self, shape: torch.Size, settings: QuantizeConfig) -> None:
        super().__init__()
        self.n_experts, self.out_features, self.in_features = shape
        self.first_expert = 0
        self.kind, self.block_size, self.doubled = settings.type, settings.block_size, settings.double
        for name, in_bytes in packed_shapes(self.n_experts * self.out_features, self.in_features, settings).items():
            self.register_parameter(name, nn.Parameter(torch.empty(in_bytes, dtype=torch.uint8), requires_grad=False))
        self.adapter: AdapterConfig | None = None

    def take_share(self, rank: int, size: int) -> None:
        """Go on with the experts of rank `rank` of `size`, whose rows the parameters have then."""
        self.n_experts //= size
        self.first_expert = rank * self.n_experts

    def adapt(self, settings: AdapterConfig) -> None:
        """Add LoRA for each expert: A [experts, r, in] and B [experts, out, r], without values and trained."""
        self.adapter = settings
        self.lora_A = _Factors(self.n_experts, settings.r, self.in_features)
        self.lora_B = _Factors(self.n_experts, self.out_features, settings.r)

    def product(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Each row times the transposed weight of its expert, with the expert's LoRA if there is one.

        `rows`: [n, in], sorted by expert. `counts`: rows of each expert; their sum is n. Returns [n, out], in the
        compute type.
        """
        state = [self.absmax, self.nested] if self.doubled else [self.absmax]
        product: torch.Tensor = _ExpertProducts.apply(rows.to(compute_dtype(rows)), self, counts, self.packed, *state)  # type: ignore[no-untyped-call]
        if self.adapter is None:
            return product
        a, b = self.lora_A(), self.lora_B()
        rows = F.dropout(rows.to(a.dtype), self.adapter.dropout, self.training)
        # Backward of a split and of unbind joins the parts once; that of a slice fills a whole tensor for each expert.
        experts = zip(torch.split(rows, counts), a.unbind(), b.unbind(), strict=True)
        products = [F.linear(F.linear(part, a_one), b_one) for part, a_one, b_one in experts if len(part)]
        return product + (torch.cat(products) * self.adapter.scaling).to(product.dtype)

    def unpacked(self, expert: int, dtype: torch.dtype, packed: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] of an expert."""
        first, end = expert * self.out_features, (expert + 1) * self.out_features
        absmax = state[0][first:end]
        if not self.doubled:
            scales = absmax.view(torch.float32).view(-1)
        else:  # the expert's first scale may lie in the middle of a block of scales
            at = (self.first_expert + expert) * self.out_features * (self.in_features // self.block_size)
            block, before = divmod(at, NESTED_BLOCK)
            scales = scales_of(F.pad(absmax.reshape(-1), (before, 0)), state[1], first_block=block)[before:]
        weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            packed[first:end], scales, self.block_size, self.kind, (self.out_features, self.in_features), dtype
        )
        return weight


class _Factors(nn.ModuleDict):
    """A or B of all experts, under the name that peft's factors have: `default.weight`."""

    def __init__(self, *shape: int) -> None:
        holder = nn.Module()
        holder.register_parameter("weight", nn.Parameter(torch.empty(shape)))
        super().__init__({"default": holder})

    def forward(self) -> Any:
        return self["default"].weight  # under parallel.ep a plain tensor, and no parameter


class _ExpertProducts(torch.autograd.Function):
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


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The sum over each token's experts of weight · down(gate(up(token)))."""
    n_tokens, top_k = top_k_index.shape
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    n_experts = self.gate_up_proj.n_experts
    if has_values(chosen):
        counts: list[int] = torch.bincount(chosen, minlength=n_experts).tolist()
    else:  # planning has no values: the rows are as even as can be
        share, more = divmod(math.prod(chosen.shape), n_experts)
        counts = [share + (expert < more) for expert in range(n_experts)]
    between = gated(self, self.gate_up_proj.product(hidden_states[order // top_k], counts))
    weighted = self.down_proj.product(between, counts) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    total: torch.Tensor = weighted[back].view(n_tokens, top_k, -1).sum(dim=1)
    return total.to(hidden_states.dtype)


_OLDEST = (0, 48)
_ROUTER = re.compile(r"(.*\.)?(gate|router|wg|\w+_gate)")
"""Names of the layers that choose experts: small ones, whose rounding would choose others."""


class BaseQuantizer:
    """Chooses the linear layers of a model whose weights are packed, and experts where it is asked to, and packs them.

    The output head, tied layers, routers, those that `skip` names and layers of other types keep their weights.
    `reference`: the model on meta, without an adapter.
    """

    def __init__(self, reference: nn.Module, settings: QuantizeConfig) -> None:
        self.settings = settings
        try:
            import bitsandbytes  # noqa: F401 - registers its operators
        except Exception as error:  # its import loads a compiled library
            cause = f"model.quantize needs bitsandbytes, which does not import: {error}"
            raise ConfigError(cause, "pip install 'shardkit[quantize]'") from error
        version = importlib.metadata.version("bitsandbytes")
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            cause = f"model.quantize needs bitsandbytes 0.48 or later, and {version} is installed"
            raise ConfigError(cause, "pip install --upgrade 'shardkit[quantize]'")
        linear = _candidates(reference)
        experts = stacked_weights(reference) if settings.experts else []
        names = _without([*linear, *experts], reference, settings.skip)
        # names of the modules whose experts are packed
        self.experts = sorted({name.rpartition(".")[0] for name in names if name in experts})
        # the name of each layer → that of its weight
        self.weights = {name: name if name in experts else f"{name}.weight" for name in names}
        # the name of each layer → the shape of its weight, [out, in]; of an experts' weight, [experts, out, in]
        self.shapes = {name: tuple(reference.get_parameter(fqn).shape) for name, fqn in self.weights.items()}
        uneven = [name for name, shape in self.shapes.items() if shape[-1] % settings.block_size]
        if uneven:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in uneven))
            raise ConfigError(
                f"model.quantize: {uneven[0]} has {self.shapes[uneven[0]][-1]} input features, no multiple of "
                f"block_size={settings.block_size}",
                f"leave such layers as they are: model.quantize={{bits: 4, skip: [{ends}]}}"
                + ("" if settings.block_size == 64 else ", or set block_size: 64"),
            )

    @property
    def expert_weights(self) -> list[str]:
        """Names of the experts' packed weights."""
        return [name for name, weight in self.weights.items() if name == weight]

    @property
    def block_size(self) -> int:
        return self.settings.block_size

    @property
    def code(self) -> torch.Tensor:
        from bitsandbytes.functional import get_4bit_type

        return get_4bit_type(self.settings.type, device="cpu")  # type: ignore[no-any-return,no-untyped-call]

    @property
    def double(self) -> bool:
        return self.settings.double

    def pack(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack whole blocks of a flattened weight; returns the packed bytes and the blocks' fp32 scales, both 1-D."""
        packed, scales = torch.ops.bitsandbytes.quantize_4bit(
            weights, self.settings.block_size, self.settings.type, torch.uint8
        )
        return packed.view(-1), scales.view(-1)

    def state(self, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """The bytes that a layer holds for its blocks' scales, 1-D, by the parameter's name.

        With double quantisation a scale less the mean of all is a byte, a level of its block of 256; the numbers beside
        them are these blocks' scales, the mean, and the levels (Dettmers et al. 2023, section 3).

        `scales`: fp32, 1-D; of the whole layer with double quantisation.
        """
        if not self.double:
            return {SCALES: scales.view(torch.uint8)}
        from bitsandbytes.functional import create_dynamic_map

        mean, levels = scales.mean(), create_dynamic_map().to(scales.device)  # type: ignore[no-untyped-call]
        rounded, block_scales = torch.ops.bitsandbytes.quantize_blockwise(scales - mean, levels, NESTED_BLOCK)
        return {SCALES: rounded, NESTED: torch.cat([block_scales, mean.view(1), levels]).view(torch.uint8)}


def pack_layers(model: nn.Module, quantizer: BaseQuantizer) -> None:
    """Replace the quantizer's layers by packed ones without values, in place."""
    for name in quantizer.experts:
        experts = model.get_submodule(name)
        for weight in WEIGHTS:
            shape = experts.get_parameter(weight).shape
            delattr(experts, weight)
            experts.add_module(weight, PackedWeight(shape, quantizer.settings))
        experts.forward = MethodType(_forward, experts)
    for name, weight in quantizer.weights.items():
        if name != weight:  # not an expert's
            prefix, _, key = name.rpartition(".")
            parent = model.get_submodule(prefix)
            setattr(parent, key, QuantizedLinear(getattr(parent, key), quantizer.settings))


def _candidates(reference: nn.Module) -> list[str]:
    """Names of the plain linear layers whose weight no other module has, without the output head and routers."""
    head = reference.get_output_embeddings()  # type: ignore[operator]
    n_uses: dict[int, int] = {}
    for _, param in reference.named_parameters(remove_duplicate=False):
        n_uses[id(param)] = n_uses.get(id(param), 0) + 1
    return [
        name
        for name, module in reference.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and n_uses[id(module.weight)] == 1
        and not _ROUTER.fullmatch(name)
    ]


def _without(names: Sequence[str], reference: nn.Module, skip: Sequence[str]) -> list[str]:
    """The layers that no entry of `skip` names or holds."""
    modules = [name for name, _ in reference.named_modules() if name]
    skipped = set[str]()
    for end in skip:
        matches = [name for name in modules if name == end or name.endswith(f".{end}")]
        if not matches:
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
            close = get_close_matches(end.rpartition(".")[2], ends, n=3, cutoff=0.5)
            fix = f"did you mean {' or '.join(close)}?" if close else f"name some of {', '.join(ends[:10])}"
            raise ConfigError(f"model.quantize.skip: {end} matches no module of the model", fix)
        skipped.update(matches)
    layers = [name for name in names if not any(name == end or name.startswith(f"{end}.") for end in skipped)]
    if not layers:
        raise ConfigError(
            f"model.quantize packs no layer: {type(reference).__name__} has no linear layers"
            + (" beside those of model.quantize.skip" if skip else ""),
            "remove model.quantize, or shorten model.quantize.skip",
        )
    return layers
