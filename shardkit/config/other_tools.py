"""Which tool a file belongs to, by its keys: another tool's file in the place of a config is refused by its name."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .schema import section_fields

_MARKS = {
    "Accelerate": "compute_environment distributed_type",
    "DeepSpeed": "zero_optimization train_micro_batch_size_per_gpu train_batch_size",
    "transformers": "model_type architectures",
    "peft": "peft_type",
    "axolotl": "base_model",
    "LLaMA-Factory": "finetuning_type cutoff_len template quantization_bit disable_gradient_checkpointing",
    "TRL": "use_peft lora_r lora_target_modules max_length max_seq_length packing padding_free dataset_text_field "
    "assistant_only_loss completion_only_loss packing_strategy",
    "transformers' Trainer": "output_dir per_device_train_batch_size num_train_epochs learning_rate max_steps "
    "gradient_accumulation_steps gradient_checkpointing bf16 fp16 deepspeed fsdp fsdp_config save_steps",
}
"""Tool → keys at the top of its files. The first tool that has one is it: recipes have the Trainer's keys too."""
PLANNED = ("Accelerate", "DeepSpeed")
"""Tools whose own files `shardkit plan --from` reads."""
_STARTS = {
    "axolotl": "axolotl train {}",
    "LLaMA-Factory": "llamafactory-cli train {}",
    "TRL": "trl sft --config {}",
    "transformers' Trainer": "python train.py {}",
}


def tool_of(content: dict[str, Any]) -> str:
    """The tool whose file has these keys; empty for a config of shardkit and for files of unknown tools."""
    sections = section_fields()
    if 2 * sum(key in sections for key in content) > len(content):
        return ""
    if any(isinstance(content.get(half), dict) for half in ("fp16", "bf16")):
        return "DeepSpeed"  # the Trainer's switches of these names are true or false
    return next((tool for tool, marks in _MARKS.items() if any(mark in content for mark in marks.split())), "")


def other_tool_error(name: str, content: dict[str, Any], in_from: bool = False) -> ConfigError | None:
    """The error for another tool's file that a command cannot read; None if no tool has its keys.

    `in_from`: the file was named by `plan --from`, which reads files of Accelerate and DeepSpeed.
    """
    tool = tool_of(content)
    if not tool or (in_from and tool in PLANNED):
        return None
    cause = f"{name} is a file of {tool}, " + ("which --from does not read" if in_from else "not a config of shardkit")
    if tool in PLANNED:
        return ConfigError(cause, f"shardkit plan --from {name} plans its job")
    if tool == "transformers":
        return ConfigError(cause, f"pass it as --model {name}, or as model.hf_config={name}")
    if tool == "peft":
        return ConfigError(cause, "set adapter.type=lora, adapter.r, … in a config")
    return ConfigError(cause, f"shardkit rehearse --gpu h100 --gpus N -- {_STARTS[tool].format(name)}")
