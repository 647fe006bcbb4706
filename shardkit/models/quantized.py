"""Frozen linear layers whose weights are stored in 4 bits, in blocks along their rows (QLoRA, Dettmers et al. 2023).

Packed weights and their scales are parameters of bytes, [out, …], so that engines shard, gather and free them by rows
as they do other parameters; nothing casts bytes. bitsandbytes packs and unpacks.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..config.schema import QuantizeConfig
from ..errors import ConfigError

PACKED, SCALES, NESTED = "packed", "absmax", "nested"
"""Names of a layer's parameters: two weights a byte; the bytes of each block's fp32 scale, or with double quantisation
one byte a block; the fp32 numbers, four bytes a row, that make scales of those bytes."""
_OLDEST = (0, 48)
_ROUTER = re.compile(r"(.*\.)?(gate|router|wg|\w+_gate)")
"""Names of the layers that choose experts: small ones, whose rounding would choose others."""
_SCALE_BYTES = 4
_NESTED_BLOCK, _LEVELS = 256, 256
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
        for name, shape in _shapes(linear.out_features, linear.in_features, settings).items():
            packed = torch.empty(shape, dtype=torch.uint8)
            self.register_parameter(name, nn.Parameter(packed, requires_grad=False))
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The packed bytes: peft looks at the weight's device and whether it is sharded."""
        packed: torch.Tensor = self.packed  # type: ignore[assignment]
        return packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        state = [self.absmax, self.nested] if self.doubled else [self.absmax]
        product: torch.Tensor = _Product.apply(input.to(dtype), self.bias, self, self.packed, *state)  # type: ignore[no-untyped-call]
        return product

    def unpacked(self, dtype: torch.dtype, packed: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] in a type."""
        scales = _scales(*state) if self.doubled else state[0].view(torch.float32).view(-1)
        weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            packed, scales, self.block_size, self.kind, (self.out_features, self.in_features), dtype
        )
        return weight


def _shapes(rows: int, columns: int, settings: QuantizeConfig) -> dict[str, tuple[int, int]]:
    """The shapes of a packed layer's parameters, in bytes."""
    n_scales = columns // settings.block_size
    if not settings.double:
        return {PACKED: (rows, columns // 2), SCALES: (rows, n_scales * _SCALE_BYTES)}
    n_numbers = -(-rows * n_scales // _NESTED_BLOCK) + 1 + _LEVELS
    return {PACKED: (rows, columns // 2), SCALES: (rows, n_scales), NESTED: (n_numbers, _SCALE_BYTES)}


def _scales(absmax: torch.Tensor, nested: torch.Tensor) -> torch.Tensor:
    """The blocks' scales in fp32, 1-D, from a byte each and the numbers of `BaseQuantizer.state`."""
    numbers = nested.view(torch.float32).view(-1)
    block_scales, mean, levels = torch.split(numbers, [numbers.numel() - 1 - _LEVELS, 1, _LEVELS])
    scales: torch.Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        absmax.view(-1), block_scales, levels, _NESTED_BLOCK, torch.float32
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


class BaseQuantizer:
    """Chooses the linear layers of a model whose weights are packed, and packs them.

    The output head, tied layers, routers, those that `skip` names and layers of other types keep their weights.

    Args:
        reference: the model on meta, without an adapter.

    Attributes:
        shapes: the name of each layer → the shape of its weight.

    Raises:
        ConfigError: bitsandbytes is missing or too old, `skip` names nothing, no layer is left, or a layer's input
            features are no multiple of the block.
    """

    def __init__(self, reference: nn.Module, settings: QuantizeConfig) -> None:
        self.settings = settings
        _import_bitsandbytes()
        names = _without(_candidates(reference), reference, settings.skip)
        self.shapes = {name: tuple(reference.get_parameter(f"{name}.weight").shape) for name in names}
        uneven = [name for name, (_, columns) in self.shapes.items() if columns % settings.block_size]
        if uneven:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in uneven))
            raise ConfigError(
                f"model.quantize: {uneven[0]} has {self.shapes[uneven[0]][1]} input features, no multiple of "
                f"block_size={settings.block_size}",
                f"leave such layers as they are: model.quantize={{bits: 4, skip: [{ends}]}}"
                + ("" if settings.block_size == 64 else ", or set block_size: 64"),
            )

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

        Args:
            scales: fp32, 1-D; of the whole layer with double quantisation.
        """
        if not self.double:
            return {SCALES: scales.view(torch.uint8)}
        from bitsandbytes.functional import create_dynamic_map

        mean, levels = scales.mean(), create_dynamic_map().to(scales.device)  # type: ignore[no-untyped-call]
        rounded, block_scales = torch.ops.bitsandbytes.quantize_blockwise(scales - mean, levels, _NESTED_BLOCK)
        return {SCALES: rounded, NESTED: torch.cat([block_scales, mean.view(1), levels]).view(torch.uint8)}


def pack_layers(model: nn.Module, quantizer: BaseQuantizer) -> None:
    """Replace the quantizer's layers by packed ones without values, in place."""
    for name in quantizer.shapes:
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
    """The layers that no entry of `skip` names or holds.

    Raises:
        ConfigError: an entry matches no module, or no layer is left.
    """
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


def _import_bitsandbytes() -> None:
    """Import bitsandbytes, which registers its operators.

    Raises:
        ConfigError: it is missing or too old.
    """
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # its import loads a compiled library
        raise ConfigError(
            f"model.quantize needs bitsandbytes, which does not import: {error}", "pip install 'shardkit[quantize]'"
        ) from error
    version = importlib.metadata.version("bitsandbytes")
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ConfigError(
            f"model.quantize needs bitsandbytes 0.48 or later, and {version} is installed",
            "pip install --upgrade 'shardkit[quantize]'",
        )
