"""Which of a model's frozen weights are stored in 4 bits, and how they are packed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import nn

from ..config.schema import QuantizeConfig
from ..errors import ConfigError
from .packed_experts import pack_experts, stacked_weights
from .quantized import NESTED, NESTED_BLOCK, SCALES, QuantizedLinear

_OLDEST = (0, 48)
_ROUTER = re.compile(r"(.*\.)?(gate|router|wg|\w+_gate)")
"""Names of the layers that choose experts: small ones, whose rounding would choose others."""


class BaseQuantizer:
    """Chooses the linear layers of a model whose weights are packed, and experts where it is asked to, and packs them.

    The output head, tied layers, routers, those that `skip` names and layers of other types keep their weights.

    Args:
        reference: the model on meta, without an adapter.

    Attributes:
        shapes: the name of each layer → the shape of its weight, [out, in]; of an experts' weight, [experts, out, in].
        experts: names of the modules whose experts are packed.
        weights: the name of each layer → that of its weight.

    Raises:
        ConfigError: bitsandbytes is missing or too old, `skip` names nothing, no layer is left, experts cannot be
            packed, or a layer's input features are no multiple of the block.
    """

    def __init__(self, reference: nn.Module, settings: QuantizeConfig) -> None:
        self.settings = settings
        _import_bitsandbytes()
        linear = _candidates(reference)
        experts = stacked_weights(reference) if settings.experts else []
        names = _without([*linear, *experts], reference, settings.skip)
        self.experts = sorted({name.rpartition(".")[0] for name in names if name in experts})
        self.weights = {name: name if name in experts else f"{name}.weight" for name in names}
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

        Args:
            scales: fp32, 1-D; of the whole layer with double quantisation.
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
        pack_experts(model.get_submodule(name), quantizer.settings)
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


def _import_bitsandbytes() -> None:
    """Import bitsandbytes, which registers its operators."""
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
