"""Settings of shardkit in the words of the tool that runs the loop: a key of its file, or a change of the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ..config.strategy import SHARDING
from .tools import KEYS

Tool = Literal["trainer", "trl", "llamafactory", "axolotl", "accelerate", "deepspeed", "lightning", "torch"]
_AUTOS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
RECOMPUTE = "model.gradient_checkpointing_enable()"
_LOADER = "batch_size={} in the DataLoader"
Phrase = str | Callable[[Any, str], str | None] | None
"""A text with a place for the value, or (value, strategy) → text; `None` if the tool has no such setting."""


def _trainer_engine(value: str, strategy: str) -> str | None:
    if SHARDING[value].stage:  # without the others DeepSpeed refuses the file, and nothing is clipped
        autos = "" if SHARDING[strategy].stage else "".join(f"{key}: auto, " for key in _AUTOS)
        return f"deepspeed: {{{autos}zero_optimization: {{stage: {SHARDING[value].stage}}}}}"
    return "fsdp: true, fsdp_config: {version: 2}" if value == "fsdp" else None


def _axolotl_engine(value: str, strategy: str) -> str | None:
    if value == "fsdp":
        return "fsdp_version: 2, fsdp_config: {reshard_after_forward: true}"
    return _trainer_engine(value, strategy)


def _accelerate_engine(value: str, strategy: str) -> str | None:
    if stage := SHARDING[value].stage:
        return f"distributed_type: DEEPSPEED, deepspeed_config: {{zero_stage: {stage}}}"
    return "distributed_type: FSDP, fsdp_config: {fsdp_version: 2}" if value == "fsdp" else None


def _lightning_engine(value: str, strategy: str) -> str | None:
    names = {
        **{name: f"deepspeed_stage_{sharding.stage}" for name, sharding in SHARDING.items() if sharding.stage},
        "fsdp": "fsdp",
    }
    return f'Trainer(strategy="{names[value]}")' if value in names else None


def _of_engine(under_zero: str | None, under_fsdp: str | None) -> Callable[[Any, str], str | None]:
    return lambda value, strategy: under_zero if SHARDING[strategy].stage else under_fsdp


def _four_bits(keys: str) -> Callable[[Any, str], str | None]:
    """Under the other engines no plan knows how a recipe's tool holds the packed base."""
    return lambda value, strategy: None if SHARDING[strategy].parameters else keys


_TRAINER: dict[str, Phrase] = {
    "activation.policy=full": "gradient_checkpointing: true",
    "precision.mode=bf16": "bf16: true",
    "optim.name=adamw8bit": "optim: adamw_torch_8bit",
    "optim.name=adamw_bnb_8bit": "optim: adamw_bnb_8bit",
    "parallel.strategy": _trainer_engine,
    "parallel.offload_optimizer=cpu": "deepspeed: {zero_optimization: {offload_optimizer: {device: cpu}}}",
    "parallel.offload_param=cpu": _of_engine(
        "deepspeed: {zero_optimization: {offload_param: {device: cpu}}}", "fsdp_config: {cpu_offload: true}"
    ),
    "parallel.reshard_after_forward=true": "fsdp_config: {reshard_after_forward: true}",
}
_PHRASES: dict[Tool, dict[str, Phrase]] = {
    "trainer": _TRAINER,
    "trl": _TRAINER,
    "llamafactory": {
        **_TRAINER,
        "activation.policy=full": "disable_gradient_checkpointing: false",
        "model.quantize.bits=4": _four_bits("quantization_bit: 4"),
    },
    "axolotl": {
        **_TRAINER,
        "model.quantize.bits=4": _four_bits("adapter: qlora, load_in_4bit: true"),
        "optim.name=adamw8bit": "optimizer: adamw_torch_8bit",
        "optim.name=adamw_bnb_8bit": "optimizer: adamw_bnb_8bit",
        "parallel.strategy": _axolotl_engine,
        "parallel.offload_param=cpu": _of_engine(
            "deepspeed: {zero_optimization: {offload_param: {device: cpu}}}", "fsdp_config: {offload_params: true}"
        ),
    },
    "accelerate": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "Accelerator(gradient_accumulation_steps={})",
        "activation.policy=full": lambda value, strategy: (
            "fsdp_config: {fsdp_activation_checkpointing: true}" if SHARDING[strategy].by_fsdp else RECOMPUTE
        ),
        "precision.mode=bf16": "mixed_precision: bf16",
        "parallel.strategy": _accelerate_engine,
        "parallel.offload_optimizer=cpu": "deepspeed_config: {offload_optimizer_device: cpu}",
        "parallel.offload_param=cpu": _of_engine(
            "deepspeed_config: {offload_param_device: cpu}", "fsdp_config: {fsdp_offload_params: true}"
        ),
        "parallel.reshard_after_forward=true": "fsdp_config: {fsdp_reshard_after_forward: true}",
        "data.workers": "num_workers={} in the DataLoader",
    },
    "deepspeed": {
        "activation.policy=full": RECOMPUTE,
        "precision.mode=bf16": "bf16: {enabled: true}",
        "parallel.strategy": lambda value, strategy: (
            f"zero_optimization: {{stage: {SHARDING[value].stage}}}" if SHARDING[value].stage else None
        ),
        "parallel.offload_optimizer=cpu": "zero_optimization: {offload_optimizer: {device: cpu}}",
        "parallel.offload_param=cpu": "zero_optimization: {offload_param: {device: cpu}}",
        "data.workers": "num_workers={} in the DataLoader",
    },
    "lightning": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "Trainer(accumulate_grad_batches={})",
        "activation.policy=full": RECOMPUTE,
        "precision.mode=bf16": 'Trainer(precision="bf16-mixed")',
        "parallel.strategy": _lightning_engine,
        "parallel.offload_optimizer=cpu": "DeepSpeedStrategy(offload_optimizer=True)",
        "parallel.offload_param=cpu": _of_engine(
            "DeepSpeedStrategy(offload_parameters=True)", "FSDPStrategy(cpu_offload=True)"
        ),
        "data.workers": "num_workers={} in the DataLoader",
    },
    "torch": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "{} micro-batches for each optimizer step",
        "activation.policy=full": RECOMPUTE,
        "precision.mode=bf16": "torch.autocast with torch.bfloat16 around forward and loss",
        "optim.name=adamw8bit": "torchao.optim.AdamW8bit",
        "optim.name=adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
        "parallel.strategy": lambda value, strategy: "fully_shard(model)" if value == "fsdp" else None,
        "parallel.offload_param=cpu": _of_engine(None, "fully_shard(…, offload_policy=CPUOffloadPolicy())"),
        "parallel.reshard_after_forward=true": "fully_shard(…, reshard_after_forward=True)",
        "data.workers": "num_workers={} in the DataLoader",
    },
}
BUCKETS: dict[Tool, str] = {
    **dict.fromkeys(
        ("trainer", "trl", "llamafactory", "axolotl"), "deepspeed: {zero_optimization: {reduce_bucket_size: {}}}"
    ),
    "accelerate": "zero_optimization: {reduce_bucket_size: {}} in the deepspeed_config_file",
    "deepspeed": "zero_optimization: {reduce_bucket_size: {}}",
    "lightning": "DeepSpeedStrategy(reduce_bucket_size={})",
    "torch": "zero_optimization: {reduce_bucket_size: {}}",
}
_WITHOUT_METHOD = "torch.utils.checkpoint around each block"


_KEYS_IN_TABLES = ("train.micro_batch_size", "train.grad_accum_steps", "data.workers")
"""Settings for which the tools' own tables give the key, unless the script decides them."""


def _key_of_table(tool: Tool, setting: str) -> str | None:
    """The key of a tool that a setting comes from, with a place for the value."""
    keys = (key for key, entry in KEYS.get(tool, {}).items() if entry.only == setting)
    return next((f"{key}: {{}}" for key in keys), None)


def phrase(tool: Tool, setting: str, strategy: str, has_checkpointing: bool = True) -> str | None:
    """One setting of shardkit, `train.micro_batch_size=2`, in a tool's words; `None` if the tool has none.

    Args:
        strategy: the engine that the setting is for; of a change of the engine, the one that runs before it.
        has_checkpointing: whether the model has transformers' `gradient_checkpointing_enable`.
    """
    key, _, value = setting.partition("=")
    phrases = _PHRASES[tool]
    wording = phrases.get(setting, phrases.get(key))
    if wording is None and key in _KEYS_IN_TABLES:
        wording = _key_of_table(tool, key)
    text = wording(value, strategy) if callable(wording) else wording and wording.replace("{}", value)
    return _WITHOUT_METHOD if text == RECOMPUTE and not has_checkpointing else text
