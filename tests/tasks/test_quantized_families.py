"""The share of each model type's values that `model.quantize` packs, as docs/adapters.md says it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardkit.config.schema import QuantizeConfig
from shardkit.errors import ConfigError
from shardkit.models.quantized import BaseQuantizer

SHARES = {
    "llama": (94, 97), "mistral": (94, 97), "phi3": (94, 97), "olmo2": (94, 97), "gpt_neox": (94, 97),
    "qwen2": (90, 91), "qwen3": (90, 91), "gemma": (90, 91), "opt": (68, 68), "mixtral": (3, 3), "qwen3_moe": (1, 1),
}  # fmt: skip


def share(model_type: str) -> float:
    """Percent of the values that are packed, at transformers' sizes: a line through one and two layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    counts = []
    for layers in (1, 2):
        config: Any = AutoConfig.for_model(model_type)
        depth, config.num_hidden_layers = config.num_hidden_layers, layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        packed = sum(math.prod(shape) for shape in BaseQuantizer(model, QuantizeConfig()).shapes.values())
        counts.append((packed, sum(param.numel() for param in model.parameters())))
    packed, values = (one + (two - one) * (depth - 1) for one, two in zip(*counts, strict=True))
    return 100 * packed / values


@pytest.mark.slow
def test_the_shares_of_families_are_true() -> None:
    for model_type, (least, most) in SHARES.items():
        assert least <= round(share(model_type)) <= most, model_type
    for model_type in ("gpt2", "falcon"):
        with pytest.raises(ConfigError, match="has no linear layers"):
            share(model_type)
