"""Files of Accelerate and DeepSpeed that have no fault, and helpers that write them and read a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardkit.foreign.translate import ForeignJob


def write(folder: Path, **files: Any) -> list[str]:
    """Files by name, dots as two underscores; text as it is, anything else as JSON."""
    names = []
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        names.append(str(path))
    return names


def fates(job: ForeignJob) -> dict[str, str]:
    return {entry.key: entry.fate for entry in job.file_keys}


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 128,
}  # fmt: skip
ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "steps_per_print": 100,
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "max_live_parameters": 1e9, "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}  # fmt: skip
FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
FSDP1 = FSDP2.replace("fsdp_version: 2", "fsdp_version: 1\n  fsdp_sync_module_states: true").replace(
    "fsdp_reshard_after_forward: true", "fsdp_sharding_strategy: HYBRID_SHARD"
)
BY_FILE = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n"
ZERO2 = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 1.0, zero3_init_flag: false, zero_stage: 2,
  offload_optimizer_device: none, offload_param_device: none}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
