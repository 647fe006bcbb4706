"""The memory that the comments of the fine-tuning recipes state is the planner's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import python_m

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
STATED = re.compile(r"^#   (Llama [\d.]+ \d+B) on (\d) × (\w+)(?: with (.+))?: ([\d.]+) GiB$", re.MULTILINE)
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Llama 3.2 1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["sft_full", "sft_lora", "pretrain_packed"])
def test_the_stated_memory_is_the_planned_one(recipe: str) -> None:
    stated = STATED.findall((CONFIGS / f"{recipe}.yaml").read_text(encoding="utf-8"))
    assert {(gpus, card) for _, gpus, card, *_ in stated} >= {("8", "h100"), ("1", "rtx4090")}
    for model, gpus, card, settings, gib in stated:
        sizes = json.dumps(LLAMA | MODELS[model])
        done = python_m(
            "shardkit.cli", "plan", f"configs/{recipe}.yaml", "model.init_from=null", "model.hf_config=null",
            "data.path=null", f"model.hf={sizes}", *settings.split(), "--gpus", gpus, "--gpu", card,
        )  # fmt: skip
        assert done.returncode == 0, f"{model} on {gpus} × {card}: {done.stdout}{done.stderr}"
        (verdict,) = re.findall(r"^verdict +(?:fits|tight).*?: ([\d.]+) GiB of", done.stdout, re.MULTILINE)
        assert float(verdict) == pytest.approx(float(gib), rel=0.02), f"{model} on {gpus} × {card}"
