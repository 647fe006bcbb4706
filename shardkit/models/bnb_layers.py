"""A base in 4 bits as transformers, peft and bitsandbytes make it."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from ..errors import NotPlannedError
from .quantized import QuantizedLinear
from .quantizer import BaseQuantizer


def packed_by_transformers(reference: nn.Module) -> set[str]:
    """Names of the layers that transformers 5.23 packs (`replace_with_bnb_linear`).

    It leaves out the output head, tied weights and the module of the last parameter.
    """
    from transformers.pytorch_utils import Conv1D

    head = reference.get_output_embeddings()  # type: ignore[operator]
    params = list(reference.named_parameters(remove_duplicate=False))
    uses, last_module = Counter(id(param) for _, param in params), params[-1][0].rpartition(".")[0]
    return {
        name
        for name, module in reference.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and module is not head
        and name != last_module
        and uses[id(module.weight)] == 1
    }


def refuse_other_layers(reference: nn.Module, quantizer: BaseQuantizer) -> None:
    """Refuse a model of which shardkit packs other layers than transformers.

    Raises:
        NotPlannedError: names a layer.
    """
    theirs_alone = packed_by_transformers(reference) ^ set(quantizer.shapes)
    if theirs_alone:
        raise NotPlannedError(
            f"not planned: a base in 4 bits of {type(reference).__name__}: transformers and shardkit disagree "
            f"about {min(theirs_alone)}",
            "to plan without it, load the base in 16 bits; with it, shardkit rehearse -- COMMAND",
        )


def follow_peft_over_bitsandbytes(model: nn.Module) -> None:
    """Let adapted layers in 4 bits do as peft's `Linear4bit`: it copies the base's output, and under CUDA's autocast it
    casts no input to the adapter's type. On the CPU it casts under autocast as well: it asks for CUDA's alone."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, QuantizedLinear):
            module.register_forward_pre_hook(_choose_casts)
            base.register_forward_hook(_copied)


def _choose_casts(layer: nn.Module, inputs: object) -> None:
    layer.cast_input_dtype_enabled = not torch.is_autocast_enabled()  # type: ignore[assignment]


def _copied(layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output.clone()
