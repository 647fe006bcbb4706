"""The page's table: the share of each model type's values that `model.quantize` packs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.config.schema import QuantizeConfig
from shardkit.errors import ConfigError
from shardkit.models.quantized import BaseQuantizer

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
ROW = re.compile(
    r"^\| `(\w+)` \| ([\d.]+) B \| ([\d.]+) % \| (?:experts, ([\d.]+) % of the values|\D+) \|$", re.MULTILINE
)
WITH_EXPERTS = re.compile(r"^\| `(\w+)` \| ([\d.]+) B \| ([\d.]+) % \|$", re.MULTILINE)


def counted(model_type: str) -> tuple[float, ...]:
    """Values, those packed, and those in stacked experts, at transformers' sizes: a line through one and two layers."""
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
        experts = sum(param.numel() for param in model.parameters() if param.dim() == 3)
        counts.append((sum(param.numel() for param in model.parameters()), packed, experts))
    return tuple(one + (two - one) * (depth - 1) for one, two in zip(*counts, strict=True))


@pytest.mark.slow
def test_the_table_of_families_is_true() -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) >= 10 and sum(bool(experts) for *_, experts in rows) >= 2
    for model_type, billions, share, experts_share in rows:
        values, packed, experts = counted(model_type)
        found = f"{values / 1e9:.2f}", f"{100 * packed / values:.1f}", f"{100 * experts / values:.1f}"
        assert found == (billions, share, experts_share or "0.0"), model_type
    for model_type in ("gpt2", "falcon"):
        with pytest.raises(ConfigError, match="has no linear layers"):
            counted(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [row[0] for row in WITH_EXPERTS.findall(PAGE.read_text())])
def test_the_table_of_experts_is_true(model_type: str) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    packed = sum(math.prod(shape) for shape in BaseQuantizer(model, QuantizeConfig(experts=True)).shapes.values())
    values = sum(param.numel() for param in model.parameters())
    assert (model_type, f"{values / 1e9:.2f}", f"{100 * packed / values:.1f}") in WITH_EXPERTS.findall(PAGE.read_text())
