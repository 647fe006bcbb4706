"""A base in 4 bits in other tools' loops: the layers that transformers packs, and what peft does around them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.config.load import load_config
from shardkit.errors import NotPlannedError
from shardkit.foreign.translate import read_job
from shardkit.models.bnb_layers import follow_peft_over_bitsandbytes, packed_by_transformers
from shardkit.plan.client import plan
from shardkit.plan.target import choose_target
from shardkit.tasks.load import load_task
from tests.commands import python_m

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip


def named(sizes: dict[str, Any]) -> dict[str, Any]:
    return {key: size for key, size in {**SIZES, **sizes}.items() if size is not None}


def adapted(model_type: str, targets: str, **sizes: Any) -> Any:
    keys = {
        "task.name": "hf_causal_lm", "model.hf": {"model_type": model_type, **named(sizes)}, "adapter.type": "lora",
        "adapter.targets": [targets], "model.quantize": {"bits": 4, "double": True}, "adapter.dropout": 0.1,
        "precision.mode": "bf16",
    }  # fmt: skip
    task: Any = load_task(load_config(None, keys).config)
    return task.adapter


@pytest.mark.parametrize(
    ("model_type", "targets", "sizes"),
    [
        ("llama", "q_proj", {}),
        ("llama", "q_proj", {"tie_word_embeddings": True}),
        ("qwen2", "q_proj", {}),
        ("gemma", "q_proj", {"head_dim": 16}),
        ("gpt_neox", "query_key_value", {"num_key_value_heads": None}),
        ("mixtral", "q_proj", {"num_local_experts": 4}),
    ],
)
def test_the_layers_in_4_bits_are_those_of_transformers(
    model_type: str, targets: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    config = AutoConfig.for_model(model_type, **named(sizes))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"}
    )
    packed = {name for name, module in loaded.named_modules() if isinstance(module, Linear4bit)}
    model = adapted(model_type, targets, **sizes)
    assert packed_by_transformers(model.reference) == packed == set(model.quantizer.shapes)
    model.use_bnb_layers()


def test_a_model_of_which_transformers_packs_other_layers_is_not_planned() -> None:
    model = adapted("llama", "q_proj")
    model.reference.model.layers[0].mlp.gate = nn.Linear(64, 8, device="meta")
    with pytest.raises(NotPlannedError, match=r"disagree about model\.layers\.0\.mlp\.gate") as caught:
        model.use_bnb_layers()
    assert "rehearse" in caught.value.fix


@pytest.mark.parametrize("on_cuda", [False, True])
def test_adapters_copy_the_output_and_cast_the_input_as_peft_does(
    on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted("llama", "q_proj").build().to_empty(device="cpu")
    for param in model.parameters():
        nn.init.zeros_(param.data)
    layer: Any = model.model.layers[0].self_attn.q_proj
    seen: list[torch.dtype] = []
    outputs: list[torch.Tensor] = []
    layer.lora_A["default"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    layer.base_layer.register_forward_hook(lambda *call: outputs.append(call[2]))
    follow_peft_over_bitsandbytes(model)
    layer.base_layer.register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.autocast("cpu", torch.bfloat16):
        # Inside: autocast asks it, too, for what to restore.
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": on_cuda or kind == "cpu")
        layer(torch.ones(2, 64, dtype=torch.bfloat16))
    assert seen == [torch.bfloat16 if on_cuda else torch.float32]
    computed, copied = outputs
    assert computed.data_ptr() != copied.data_ptr() and torch.equal(computed, copied)


@pytest.mark.slow
def test_the_peak_of_the_trainer_with_peft_and_bitsandbytes_is_predicted(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    done = python_m("tests.plan.qlora_run", tmp_path / "model", tmp_path / "out", 128, code=0)
    (measured,) = map(int, re.findall(r"^peak (\d+)$", done.stdout, re.MULTILINE))
    recipe = {
        "model_name_or_path": str(tmp_path / "model"), "stage": "sft", "do_train": True, "finetuning_type": "lora",
        "lora_rank": 8, "lora_dropout": 0.1, "lora_target": "q_proj,v_proj,down_proj", "cutoff_len": 128,
        "per_device_train_batch_size": 2, "bf16": True, "quantization_bit": 4, "use_cpu": True, "output_dir": "out",
    }  # fmt: skip
    job = read_job([recipe], str(tmp_path / "model"), 1)
    config = job.load().config
    assert measured == pytest.approx(plan(config, choose_target(config, 1), loop=job.loop).peak.allocated, rel=0.01)
