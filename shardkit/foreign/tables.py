"""Keys of Accelerate's and DeepSpeed's files that change memory, with the keys here that say the same, and the others.

Keys without a counterpart are listed too, so that a typo and a newer release's key can be told from them; `section.*`
stands for every key of a section. tests/foreign compares the tables with the installed packages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Settings = dict[str, Any]
Convert = Callable[[Any], Settings]
"""A value of the tool → keys here with their values."""


STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
PASSED = "parallel.ds_config."


class NoCounterpart(Exception):
    """A value that changes memory and that shardkit cannot train, and therefore not plan."""


class WrongValue(Exception):
    """A value that the tool itself refuses."""


def truth(value: Any) -> bool:
    """Files hold `true`, `"true"`, `"yes"` and `1` for the same."""
    if str(value).lower() not in ("true", "yes", "1", "false", "no", "0"):
        raise WrongValue("it is neither true nor false")
    return str(value).lower() in ("true", "yes", "1")


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        raise WrongValue("it is not a whole number")
    return int(value)


def _norm(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WrongValue("it is not a number")
    return value or None  # 0 turns clipping off in both tools


def _stage(value: Any) -> str:
    if isinstance(value, bool) or value not in STAGES:
        raise WrongValue("it is none of the stages 0, 1, 2, 3")
    return STAGES[value]


def _to(setting: str, convert: Callable[[Any], Any] = lambda value: value) -> Convert:
    return lambda value: {setting: convert(value)}


def _if_on(setting: str, counterpart: Any) -> Convert:
    return lambda value: {setting: counterpart} if truth(value) else {}


_COUNTS = """
    reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
    stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance
"""
_SWITCHES = """
    overlap_comm contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients parameter_alignment
    memory_efficient_linear stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
"""
_OFFLOADS = """
    offload_optimizer.pin_memory offload_optimizer.buffer_count offload_optimizer.pipeline_read
    offload_optimizer.pipeline_write offload_optimizer.fast_init offload_param.pin_memory offload_param.buffer_count
    offload_param.buffer_size offload_param.max_in_cpu
"""


def _passed_through(names: str, convert: Callable[[Any], Any]) -> dict[str, Convert]:
    """Keys of `zero_optimization` that reach DeepSpeed as they are."""
    return {f"zero_optimization.{name}": _to(f"{PASSED}zero_optimization.{name}", convert) for name in names.split()}


def _adam(value: Any) -> Settings:
    if str(value).lower() not in ("adam", "adamw"):  # its Adam decays as AdamW does
        raise NoCounterpart("shardkit has only adam and adamw of DeepSpeed's optimizers")
    return {"optim.name": "adamw"}


_DEEPSPEEDS_OTHERS = """
    steps_per_print dump_state disable_python_gc wall_clock_breakdown memory_breakdown log_level
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor
    gradient_allreduce_op disable_allgather seq_parallel_communication_data_type use_data_before_expert_parallelism
    dataloader_drop_last vocabulary_size managed_gradient_accumulation flops_profiler.* comms_logger.* tensorboard.*
    wandb.* csv_monitor.* comet.* checkpoint.* aio.* timers.* autotuning.* data_efficiency.* datastates_ckpt.*
    monitor_config.* bf16.check_grad_overflow bf16.immediate_grad_update fp16.auto_cast fp16.hysteresis
    fp16.min_loss_scale fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.consecutive_hysteresis
    optimizer.params.* scheduler.* optimizer.legacy_fusion dataloader_config.*
    zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint zero_optimization.legacy_stage1
    zero_optimization.log_trace_cache_warnings zero_optimization.stage3_gather_fp16_weights_on_model_save
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.ignore_unused_parameters
    zero_optimization.compute_grad_norm zero_optimization.pipeline_loading_checkpoint communication_data_type_op
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.enable_sanity_checks
    zero_optimization.override_module_apply zero_optimization.save_muon_momentum_buffer_in_memory torch_autocast.*
    zero_optimization.leaf_module.* zero_optimization.zero_quantized_weights
    zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_gradients
    zero_optimization.zenflow.* weight_quantization.* compile.* zero_optimization.cpu_offload_use_pin_memory
    zero_optimization.offload_optimizer.super_offload zero_optimization.offload_optimizer.cpuadam_cores_perc
    tensor_parallel.* expert_parallel.* hybrid_engine.* sequence_parallel_size activation_checkpointing.* pipeline.*
    bf16.bf16_master_weights_and_grads fp16.fp16_master_weights_and_grads
"""
"""Keys that change no memory, or that `unplanned_effect` knows."""
DEEPSPEED: dict[str, Convert | None] = {
    "train_micro_batch_size_per_gpu": _to("train.micro_batch_size", whole),
    "train_batch_size": _to("train.global_batch_size", whole),
    "gradient_accumulation_steps": _to("train.grad_accum_steps", whole),
    "gradient_clipping": _to("train.max_norm", _norm),
    "zero_optimization.stage": _to("parallel.strategy", _stage),
    "zero_optimization.offload_optimizer.device": _to("parallel.offload_optimizer"),
    "zero_optimization.offload_param.device": _to("parallel.offload_param"),
    "zero_optimization.offload_optimizer.nvme_path": _to("parallel.nvme_path"),
    "zero_optimization.offload_param.nvme_path": _to("parallel.nvme_path"),
    "zero_optimization.offload_optimizer.ratio": _to("parallel.offload_ratio"),
    "zero_optimization.zero_hpz_partition_size": lambda value: {} if value == 1 else {"parallel.hpz": whole(value)},
    "zero_optimization.cpu_offload": _if_on("parallel.offload_optimizer", "cpu"),
    "zero_optimization.cpu_offload_param": _if_on("parallel.offload_param", "cpu"),
    **_passed_through(_COUNTS, whole),
    **_passed_through(_SWITCHES, truth),
    **_passed_through(_OFFLOADS, lambda value: value),
    "fp16.enabled": _to("fp16", truth),
    "bf16.enabled": _to("bf16", truth),
    "bfloat16.enabled": _to("bf16", truth),
    "bf16.bf16_optimizer_states": _if_on("precision.mode", "pure_bf16"),
    "communication_data_type": _to("precision.reduce_dtype"),
    "data_types.grad_accum_dtype": _to(f"{PASSED}data_types.grad_accum_dtype"),
    "optimizer.type": _adam,
    **dict.fromkeys(_DEEPSPEEDS_OTHERS.split()),
}
DEEPSPEED_DEFAULTS: Settings = {
    "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.allgather_bucket_size": 500_000_000,
    "zero_optimization.contiguous_gradients": True,
}
"""DeepSpeed's own defaults, where they differ from shardkit's."""

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _sharding(value: Any) -> Settings:
    """FSDP1's strategy by name or number, or FSDP2's `reshard_after_forward`."""
    if str(value).lower() in ("true", "false"):
        return {"parallel.reshard_after_forward": truth(value)}
    name = _SHARDING[int(value) - 1] if str(value) in tuple("12345") else str(value).upper()
    if name not in _SHARDING:
        raise WrongValue(f"it is none of {', '.join(_SHARDING)}")
    if name == "NO_SHARD":
        return {"parallel.strategy": "ddp"}
    strategy = "hsdp" if name.startswith("HYBRID") else "fsdp"
    return {"parallel.strategy": strategy, "parallel.reshard_after_forward": name in ("FULL_SHARD", "HYBRID_SHARD")}


def _halves(value: Any) -> Settings:
    """`mixed_precision`: `translate` makes one `precision.mode` of all files' fp16 and bf16."""
    word = "no" if value is False else str(value)  # YAML reads an unquoted no as false
    if word not in ("no", "fp16", "bf16", "fp8"):
        raise WrongValue("it is none of no, fp16, bf16, fp8")
    return {"precision.mode": "fp8"} if word == "fp8" else {"fp16": word == "fp16", "bf16": word == "bf16"}


def _engine(value: Any) -> Settings:
    engines = {"no": "single", "multi_gpu": "ddp", "multi_cpu": "ddp", "fsdp": "fsdp", "deepspeed": "zero2"}
    if str(value).lower() not in engines:
        raise NoCounterpart(f"shardkit plans only {', '.join(engines)}")
    return {"engine": engines[str(value).lower()]}


def _classes(value: Any) -> Settings:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return {"activation.block_classes": [name.strip() for name in names if name.strip()]}


def _replicas(value: Any) -> Settings:
    return {"parallel.strategy": "hsdp", "parallel.dp_replicate": whole(value)} if whole(value) > 1 else {}


def _path(value: Any) -> Settings:
    return {} if value == "none" else {"parallel.nvme_path": value}


_ACCELERATES_OTHERS = """
    compute_environment debug enable_cpu_affinity main_training_function machine_rank gpu_ids main_process_ip
    main_process_port rdzv_backend same_network downcast_bf16 tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm
    tpu_zone command_file commands mpirun_config.* ipex_config.* fp8_config.* parallelism_config.*
    fsdp_config.fsdp_version fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_min_num_params
    fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_use_orig_params
    fsdp_config.fsdp_ignored_modules fsdp_config.fsdp_limit_all_gathers fsdp_config.fsdp_cpu_ram_efficient_loading
    fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_state_dict_type deepspeed_config.zero3_init_flag
    deepspeed_config.zero3_save_16bit_model deepspeed_config.deepspeed_config_file
    deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile
    deepspeed_config.deepspeed_inclusion_filter deepspeed_config.deepspeed_exclusion_filter
    deepspeed_config.deepspeed_moe_layer_cls_names dynamo_config.dynamo_use_dynamic
    dynamo_config.dynamo_use_fullgraph dynamo_config.dynamo_use_regional_compilation megatron_lm_config.*
"""
"""Keys that change no memory, or that `unplanned_effect` knows."""
ACCELERATE: dict[str, Convert | None] = {
    "distributed_type": _engine,
    "mixed_precision": _halves,
    "num_processes": _to("gpus", whole),
    "num_machines": _to("machines", whole),
    "use_cpu": _if_on("run.device", "cpu"),
    "parallelism_config.parallelism_config_dp_replicate_size": _replicas,
    "parallelism_config.parallelism_config_dp_shard_size": _to("parallel.dp_shard", whole),
    "fsdp_config.fsdp_sharding_strategy": _sharding,
    "fsdp_config.fsdp_reshard_after_forward": _sharding,
    "fsdp_config.fsdp_activation_checkpointing": _if_on("activation.policy", "full"),
    "fsdp_config.fsdp_activation_checkpointing_offload": _if_on("activation.offload", "cpu"),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": _classes,
    "fsdp_config.fsdp_offload_params": _if_on("parallel.offload_param", "cpu"),
    "deepspeed_config.zero_stage": _to("parallel.strategy", _stage),
    "deepspeed_config.gradient_clipping": _to("train.max_norm", _norm),
    "deepspeed_config.gradient_accumulation_steps": _to("train.grad_accum_steps", whole),
    "deepspeed_config.offload_optimizer_device": _to("parallel.offload_optimizer"),
    "deepspeed_config.offload_param_device": _to("parallel.offload_param"),
    "deepspeed_config.offload_optimizer_nvme_path": _path,
    "deepspeed_config.offload_param_nvme_path": _path,
    "dynamo_config.dynamo_backend": lambda value: {"compile.enabled": str(value).lower() not in ("no", "false")},
    "dynamo_config.dynamo_mode": _to("compile.mode"),
    **dict.fromkeys(_ACCELERATES_OTHERS.split()),
}
KEYS = {"Accelerate": ACCELERATE, "DeepSpeed": DEEPSPEED}

_IN = r"(?:^|.*\.)(?:parallelism_config_)?"
_UNPLANNED = (
    (rf"{_IN}(?:tp_size|autotp_size|tensor_parallel(?:_size)?)", "tensor parallelism divides weights and activations"),
    (rf"{_IN}(?:[cs]p_size|(?:context|sequence)_parallel_size)", "the tokens of a sample are divided over ranks"),
    (rf"{_IN}(?:ep_size|autoep_size|expert_parallel_size)|expert_parallel\.enabled", "experts are divided over ranks"),
    (r"zero_optimization\.zero_quantized_\w+|weight_quantization\.(?:.*\.)?enabled", "values travel in fewer bits"),
    (r"zero_optimization\.zenflow\..*", "ZenFlow splits the update between device and host"),
    (r"zero_optimization\.leaf_module\..*", "the named modules are gathered whole, with everything in them"),
    (r"zero_optimization\.offload_optimizer\.super_offload", "optimizer state moves to the host in another order"),
    (r"torch_autocast\.enabled", "weights stay in fp32, and forward runs under torch's autocast"),
    (r"compile\.deepcompile", "DeepCompile gathers and frees parameters in an order of its own"),
    (r"hybrid_engine\.enabled", "the model is kept for generation too"),
    (r"(?:bf16|fp16)\.\w+_master_weights_and_grads", "master weights and gradients are kept in 16 bits"),
)


def unplanned_effect(key: str, value: Any) -> str:
    """What a key changes in memory that no plan has; empty if it is off, a size of 1, or has no such effect.

    The keys are known by name in any section, because releases move keys from one section to another.
    """
    is_size = key.endswith(("_size", "tensor_parallel"))
    if (is_size and value in (1, -1, "1", "-1")) or str(value).lower() in (
        "",
        "none",
        "null",
        "no",
        "false",
        "0",
        "[]",
    ):
        return ""
    return next((effect for pattern, effect in _UNPLANNED if re.fullmatch(pattern, key)), "")


def find(tool: str, key: str) -> tuple[bool, Convert | None]:
    """Whether a tool has a dotted key, and its counterpart here; a key of a listed section counts as the tool's."""
    parts = key.split(".")
    names = [key, *(".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1))]
    name = next((name for name in names if name in KEYS[tool]), None)
    return name is not None, None if name is None else KEYS[tool][name]
