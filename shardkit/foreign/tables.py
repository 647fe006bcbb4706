"""One table per tool: each of its keys, and the keys here that say the same.

A table has every key of a tool's files, dotted. A key without a counterpart is listed too, so that a typo can be
told from it; `section.*` stands for every key of a section. tests/foreign compares the tables with the
installed packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config.errors import expected
from ..config.names import HERE

Settings = dict[str, Any]
AUTO = "auto"


class NoCounterpart(Exception):
    """A value that shardkit cannot train, and therefore not plan."""


class WrongValue(NoCounterpart):
    """A value that their own tool does not take either."""


@dataclass(frozen=True)
class Problem:
    """A reason not to plan the files' job.

    Attributes:
        kind: `contradiction`, `auto`, `no counterpart`, `wrong value`, `missing file`, or `unsaid`.
        setting: the key here that settles it if it is set on the command line.
        keys: the keys of theirs that it is about.
    """

    kind: str
    cause: str
    fix: str
    setting: str = ""
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Key:
    """A key of another tool.

    Attributes:
        convert: a value of theirs → keys here with their values; `None`: nothing here corresponds.
        note: why nothing corresponds, if that changes memory; else the key goes into a list of names. Of a key with a
            counterpart, a remark about it.
        dead: their tool reads the key and does nothing with it.
        only: one key here that gets the value; with it `auto` can be filled from another file.
        effect: a change of memory that no plan here has, if the key is on.
    """

    convert: Callable[[Any], Settings] | None = None
    note: str = ""
    dead: bool = False
    only: str = ""
    effect: str = ""


def to(setting: str, convert: Callable[[Any], Any] = lambda value: value) -> Key:
    """A key with one counterpart."""
    return Key(lambda value: {setting: convert(value)}, only=setting)


def named(names: str, convert: Callable[[Any], Any] | None = None, section: str = "") -> dict[str, Key]:
    """Keys for which `config.names` has the key here. `convert` a value; default: by the type of the key here."""
    return {section + name: to(HERE[name], convert or partial(_typed, HERE[name])) for name in names.split()}


def _typed(setting: str, content: Any) -> Any:
    section, key = setting.split(".")[:2]
    accepted = expected(section, key)
    convert = next((convert for start, convert in _OF_TYPE.items() if accepted.startswith(start)), None)
    return content if convert is None else convert(content)


def one_of(setting: str, values: Mapping[Any, Any]) -> Key:
    """A key whose values have counterparts one by one."""
    return to(setting, lambda value: _chosen(value, values))


def absent(*names: str, note: str = "") -> dict[str, Key]:
    return {name: Key(note=note) for words in names for name in words.split()}


def accepted(names: str, note: str, only: str = "") -> dict[str, Key]:
    """Keys of which no value sets anything here."""
    return {name: Key(lambda value: {}, note, only=only) for name in names.split()}


def unplanned(effect: str, names: str) -> dict[str, Key]:
    """Keys that change memory as no plan here does; `section.*` stands for all keys of a section."""
    return {name: Key(effect=effect) for name in names.split()}


def dead(*names: str) -> dict[str, Key]:
    return {name: Key(dead=True) for words in names for name in words.split()}


ROWS = "planned are full rows of train.seq_len tokens, packed or padded"


def truth(value: Any) -> bool:
    """Their files have `true`, `"true"`, `"yes"` and `1` for the same."""
    if isinstance(value, str) and value.lower() in ("true", "yes", "1", "false", "no", "0"):
        return value.lower() in ("true", "yes", "1")
    if not isinstance(value, (bool, int)):
        raise WrongValue("it is neither true nor false")
    return bool(value)


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise WrongValue("it is not a whole number")
    return int(value)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WrongValue("it is not a number")
    return value


_OF_TYPE = {"an integer": whole, "a number": number, "a list of 2 numbers": number, "true or false": truth}


def norm(value: Any) -> float | None:
    """A clipping norm; 0 turns clipping off."""
    return number(value) or None


def _chosen(value: Any, values: Mapping[Any, Any]) -> Any:
    if not isinstance(value, (str, int)):
        raise WrongValue("it is neither a word nor a number")
    counterpart = values.get(value.lower() if isinstance(value, str) else value)
    if counterpart is None:
        raise NoCounterpart(f"shardkit has only {', '.join(dict.fromkeys(map(str, values)))}")
    return counterpart


def on(setting: str, value: Any, cause: Any = True) -> Settings:
    """A switch that sets a key if it is on; off, it leaves the key to other files."""
    return {setting: value} if truth(cause) else {}


def recompute(value: Any) -> Settings:
    return on(HERE["gradient_checkpointing"], "full", value)


_RECOMPUTE = Key(recompute, only=HERE["gradient_checkpointing"])


def unless_off(reason: str) -> Key:
    """A key that shardkit cannot follow if it is set."""

    def settings(value: Any) -> Settings:
        if value not in (None, False, "none", [], ""):
            raise NoCounterpart(reason)
        return {}

    return Key(settings)


# DeepSpeed

STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
DS_OPTIMIZERS = {"adamw": "adamw", "adam": "adamw"}  # its Adam decays as AdamW does unless told otherwise
DS_SCHEDULES: dict[str, Settings] = {
    "warmuplr": {"optim.schedule": "constant"},
    "warmupdecaylr": {"optim.schedule": "linear", "optim.min_lr_ratio": 0.0},
    "warmupcosinelr": {"optim.schedule": "cosine"},
}


def raw(key: str, convert: Callable[[Any], Any] = lambda value: value) -> Key:
    """A key of DeepSpeed that shardkit passes through."""
    return to(f"parallel.ds_config.{key}", convert)


def _stage(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value not in STAGES:
        raise WrongValue("it is none of the stages 0, 1, 2, 3")
    return STAGES[value]


def _cpu(switch: Any) -> str:
    return "cpu" if truth(switch) else "none"


def _betas(value: Any) -> Settings:
    if not isinstance(value, list) or len(value) != 2:
        raise WrongValue("it is not a pair of numbers")
    return {"optim.betas.0": value[0], "optim.betas.1": value[1]}


_BUCKETS = "reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size"
_BUCKETS += " stage3_model_persistence_threshold stage3_module_granularity_threshold"
_BUCKETS += " stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance"
_SWITCHES = "overlap_comm contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients"
_SWITCHES += " parameter_alignment memory_efficient_linear stage3_use_all_reduce_for_fetch_params"
_SWITCHES += " stage3_allgather_sequential"
_OFFLOAD = {
    "optimizer": "pin_memory buffer_count pipeline_read pipeline_write fast_init",
    "param": "pin_memory buffer_count buffer_size max_in_cpu",
}

_LOADING = "it changes loading and saving, below"
GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"

DEEPSPEED: dict[str, Key] = {
    **named("train_micro_batch_size_per_gpu train_batch_size gradient_accumulation_steps"),
    **named("gradient_clipping", norm),
    "zero_optimization.stage": to("parallel.strategy", _stage),
    **{f"zero_optimization.{key}": raw(f"zero_optimization.{key}", whole) for key in _BUCKETS.split()},
    **{f"zero_optimization.{key}": raw(f"zero_optimization.{key}", truth) for key in _SWITCHES.split()},
    "zero_optimization.offload_optimizer.device": to("parallel.offload_optimizer"),
    "zero_optimization.offload_param.device": to("parallel.offload_param"),
    "zero_optimization.offload_optimizer.nvme_path": to("parallel.nvme_path"),
    "zero_optimization.offload_param.nvme_path": to("parallel.nvme_path"),
    "zero_optimization.offload_optimizer.ratio": to("parallel.offload_ratio", number),
    **{
        f"zero_optimization.offload_{part}.{key}": raw(f"zero_optimization.offload_{part}.{key}")
        for part, keys in _OFFLOAD.items()
        for key in keys.split()
    },
    "zero_optimization.zero_hpz_partition_size": to("parallel.hpz", lambda value: None if value == 1 else whole(value)),
    "fp16.enabled": to("fp16", truth),
    "bf16.enabled": to("bf16", truth),
    "bfloat16.enabled": to("bf16", truth),
    **named("communication_data_type"),
    "fp16.initial_scale_power": to("precision.loss_scale_init_power", whole),
    "fp16.loss_scale_window": to("precision.loss_scale_window", whole),
    "data_types.grad_accum_dtype": raw("data_types.grad_accum_dtype"),
    "bf16.bf16_optimizer_states": Key(lambda value: on("precision.mode", "pure_bf16", value)),
    "optimizer.type": one_of("optim.name", DS_OPTIMIZERS),
    "optimizer.params.lr": to("optim.lr", number),
    "optimizer.params.betas": Key(_betas),
    "optimizer.params.eps": to("optim.eps", number),
    "optimizer.params.weight_decay": to("optim.weight_decay", number),
    "scheduler.type": Key(lambda value: dict(_chosen(value, DS_SCHEDULES))),
    "scheduler.params.cos_min_ratio": to("optim.min_lr_ratio", number),
    "scheduler.params.warmup_num_steps": to("optim.warmup_steps", whole),
    "scheduler.params.warmup_max_lr": to("optim.lr", number),
    "scheduler.params.total_num_steps": to("train.max_steps", whole),
    **absent(
        """
        steps_per_print dump_state disable_python_gc wall_clock_breakdown memory_breakdown log_level
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor
        gradient_allreduce_op disable_allgather seq_parallel_communication_data_type
        use_data_before_expert_parallelism dataloader_drop_last vocabulary_size managed_gradient_accumulation
        flops_profiler.* comms_logger.* tensorboard.* wandb.* csv_monitor.* comet.* checkpoint.* aio.* timers.*
        autotuning.* data_efficiency.* datastates_ckpt.* monitor_config.* bf16.check_grad_overflow
        bf16.immediate_grad_update fp16.auto_cast fp16.hysteresis fp16.min_loss_scale
        fp16.consecutive_hysteresis optimizer.params.* scheduler.params.* optimizer.legacy_fusion
        dataloader_config.* zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint
        zero_optimization.legacy_stage1 zero_optimization.log_trace_cache_warnings
        zero_optimization.stage3_gather_fp16_weights_on_model_save
        zero_optimization.ignore_unused_parameters zero_optimization.compute_grad_norm
        zero_optimization.pipeline_loading_checkpoint communication_data_type_op
        zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.enable_sanity_checks
        zero_optimization.override_module_apply zero_optimization.save_muon_momentum_buffer_in_memory
        torch_autocast.* zero_optimization.leaf_module.* zero_optimization.zero_quantized_weights
        zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_gradients
        zero_optimization.zenflow.* weight_quantization.* compile.*
        zero_optimization.offload_optimizer.super_offload zero_optimization.offload_optimizer.cpuadam_cores_perc
        tensor_parallel.* expert_parallel.* hybrid_engine.* sequence_parallel_size
        bf16.bf16_master_weights_and_grads fp16.fp16_master_weights_and_grads
        """,
    ),
    GATHER: Key(note=_LOADING),
    "fp16.loss_scale": Key(note="a fixed loss scale: shardkit's is dynamic; memory is the same"),
    **absent("activation_checkpointing.*", note="only models that call DeepSpeed's own checkpointing read it"),
    **absent("pipeline.*", note="only DeepSpeed's PipelineModule reads it"),
    "zero_optimization.cpu_offload": to("parallel.offload_optimizer", _cpu),
    "zero_optimization.cpu_offload_param": to("parallel.offload_param", _cpu),
    "zero_optimization.cpu_offload_use_pin_memory": Key(dead=True),
}
DEEPSPEED_DEFAULTS: Settings = {
    "gradient_clipping": 0.0,
    "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.allgather_bucket_size": 500_000_000,
    "zero_optimization.contiguous_gradients": True,
}
"""DeepSpeed's own defaults, where they differ from shardkit's."""
STAGE3_DEFAULTS: Settings = {"zero_optimization.stage3_prefetch_bucket_size": 50_000_000}
_REMOVED = """
    elasticity graph_harvesting nebula compression_training amp quantize_training sparse_gradients eigenvalue
    sparse_attention curriculum_learning progressive_layer_drop zero_optimization.mics_shard_size
    zero_optimization.mics_hierarchical_params_gather zero_optimization.zeropp_loco_param
"""
DEEPSPEED_REMOVED = _REMOVED.split()


# Accelerate

DISTRIBUTED = {"no": "single", "multi_gpu": "ddp", "multi_cpu": "ddp", "fsdp": "fsdp", "deepspeed": "zero2"}
FSDP_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def halves(value: Any) -> Settings:
    """`mixed_precision`: the pseudo-keys fp16 and bf16 become `precision.mode` when all files are read."""
    switches = {"no": (False, False), "fp16": (True, False), "bf16": (False, True)}
    if value == "fp8":
        return {"precision.mode": "fp8"}
    if value is False:  # an unquoted no
        value = "no"
    if not isinstance(value, str) or value not in switches:
        raise WrongValue("it is none of no, fp16, bf16, fp8")
    return dict(zip(("fp16", "bf16"), switches[value], strict=True))


def sharding(value: Any) -> Settings:
    """FSDP1's strategy by name or number, or FSDP2's `reshard_after_forward`."""
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return {"parallel.reshard_after_forward": truth(value)}
    name = FSDP_SHARDING[int(value) - 1] if str(value) in tuple("12345") else str(value).upper()
    if name not in FSDP_SHARDING:
        raise WrongValue(f"it is none of {', '.join(FSDP_SHARDING)}")
    if name == "NO_SHARD":
        return {"parallel.strategy": "ddp"}
    strategy = "hsdp" if name.startswith("HYBRID") else "fsdp"
    return {"parallel.strategy": strategy, "parallel.reshard_after_forward": name in ("FULL_SHARD", "HYBRID_SHARD")}


def offload_param(value: Any) -> Settings:
    return on("parallel.offload_param", "cpu", value)


def replicas(value: Any) -> Settings:
    """Groups of FSDP2 that each hold the whole state; with 1 it is plain sharding."""
    return {"parallel.strategy": "hsdp", "parallel.dp_replicate": whole(value)} if whole(value) > 1 else {}


def shards(value: Any) -> Settings:
    return {"parallel.dp_shard": value} if whole(value) > 1 else {}


def nvme_path(value: Any) -> Settings:
    return {} if value in (None, "none") else {"parallel.nvme_path": value}


def classes(value: Any) -> Settings:
    names = value if isinstance(value, list) else [name.strip() for name in str(value or "").split(",")]
    return {"activation.block_classes": [name for name in names if name]}


FSDP: dict[str, Key] = {  # without the prefix fsdp_
    "sharding_strategy": Key(sharding),
    "reshard_after_forward": Key(sharding),
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_offload": Key(lambda value: on("activation.offload", "cpu", value)),
    "transformer_layer_cls_to_wrap": Key(classes),
    **absent("version auto_wrap_policy min_num_params forward_prefetch backward_prefetch use_orig_params"),
    **absent("ignored_modules limit_all_gathers"),
    **absent("cpu_ram_efficient_loading sync_module_states state_dict_type", note=_LOADING),
}
ACCELERATE: dict[str, Key] = {
    "distributed_type": one_of("engine", DISTRIBUTED),
    "mixed_precision": Key(halves, only="precision.mode"),
    "num_processes": to("gpus", whole),
    "num_machines": to("machines", whole),
    "parallelism_config.parallelism_config_dp_replicate_size": Key(replicas),
    "parallelism_config.parallelism_config_dp_shard_size": Key(shards),
    "use_cpu": Key(lambda value: on("run.device", "cpu", value)),
    **{f"fsdp_config.fsdp_{name}": key for name, key in FSDP.items()},
    "fsdp_config.fsdp_offload_params": Key(offload_param),
    **named("zero_stage", _stage, "deepspeed_config."),
    **named("gradient_clipping", norm, "deepspeed_config."),
    **named("gradient_accumulation_steps offload_optimizer_device offload_param_device", section="deepspeed_config."),
    "deepspeed_config.offload_optimizer_nvme_path": Key(nvme_path),
    "deepspeed_config.offload_param_nvme_path": Key(nvme_path),
    "dynamo_config.dynamo_backend": Key(lambda value: {"compile.enabled": str(value).lower() not in ("no", "false")}),
    **named("dynamo_mode", section="dynamo_config."),
    **absent(
        """
        compute_environment debug enable_cpu_affinity main_training_function machine_rank gpu_ids
        main_process_ip main_process_port rdzv_backend same_network downcast_bf16 tpu_env tpu_name tpu_use_cluster
        tpu_use_sudo tpu_vm tpu_zone command_file commands mpirun_config.* ipex_config.* fp8_config.*
        deepspeed_config.deepspeed_config_file deepspeed_config.deepspeed_multinode_launcher
        deepspeed_config.deepspeed_hostfile deepspeed_config.deepspeed_inclusion_filter
        deepspeed_config.deepspeed_exclusion_filter deepspeed_config.deepspeed_moe_layer_cls_names
        dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_fullgraph
        dynamo_config.dynamo_use_regional_compilation parallelism_config.*
        """,
    ),
    **absent("deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model", note=_LOADING),
    **absent("megatron_lm_config.*", note="only distributed_type MEGATRON_LM reads it"),
}


# The Trainer

OPTIMIZERS: dict[str, Settings] = {
    "adamw_torch": {"optim.name": "adamw", "optim.implementation": "foreach"},
    "adamw_torch_fused": {"optim.name": "adamw", "optim.implementation": "fused"},
    "sgd": {"optim.name": "sgd"},
    "adafactor": {"optim.name": "adafactor"},
    "adamw_torch_8bit": {"optim.name": "adamw8bit"},
    "adamw_bnb_8bit": {"optim.name": "adamw_bnb_8bit"},
    "adamw_8bit": {"optim.name": "adamw_bnb_8bit"},
}
FOUR_BITS = {"nf4": "nf4", "fp4": "fp4"}
"""bitsandbytes' types of 4 bits, named alike here."""
SCHEDULES: dict[str, Settings] = {
    "linear": {"optim.schedule": "linear", "optim.min_lr_ratio": 0.0},
    "cosine": {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0},
    "cosine_with_min_lr": {"optim.schedule": "cosine"},
    "constant": {"optim.schedule": "constant"},
    "constant_with_warmup": {"optim.schedule": "constant"},
}


def trainer_fsdp(value: Any) -> Settings:
    """`true`, or words of earlier versions: `full_shard auto_wrap offload`."""
    if value in (None, "", False, []):
        return {}
    if value is True or str(value).lower() == "true":
        return {"parallel.strategy": "fsdp"}
    chosen: Settings = {}
    for word in value if isinstance(value, list) else str(value).split():
        if word == "offload":
            chosen["parallel.offload_param"] = "cpu"
        elif word != "auto_wrap":
            chosen |= sharding(word)
    return chosen


def warmup(value: Any) -> Settings:
    """Steps; below 1 a share of steps, which does not change memory."""
    return {"optim.warmup_steps": whole(value)} if number(value) >= 1 else {}


TRAINER: dict[str, Key] = {
    **named(
        """
        per_device_train_batch_size gradient_accumulation_steps learning_rate weight_decay adam_beta1 adam_beta2
        adam_epsilon seed full_determinism torch_compile ddp_bucket_cap_mb
        ddp_find_unused_parameters dataloader_num_workers dataloader_drop_last max_length max_seq_length
        """
    ),
    "max_steps": Key(lambda value: {"train.max_steps": whole(value)} if number(value) > 0 else {}),
    **named("max_grad_norm", norm),
    "optim": Key(lambda value: dict(_chosen(value, OPTIMIZERS)), only="optim.name"),
    "lr_scheduler_type": Key(lambda value: dict(_chosen(value, SCHEDULES)), only=HERE["lr_scheduler_type"]),
    "lr_scheduler_kwargs.min_lr_rate": to("optim.min_lr_ratio", number),
    "warmup_steps": Key(warmup),
    "fp16": to("fp16", truth),
    "bf16": to("bf16", truth),
    "tf32": to("tf32", truth),
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "torch_compile_mode": Key(lambda value: {"compile.enabled": True, "compile.mode": value} if value else {}),
    "use_cpu": Key(lambda value: on("run.device", "cpu", value)),
    "fsdp": Key(trainer_fsdp),
    **{f"fsdp_config.{name}": key for name, key in FSDP.items()},
    "fsdp_config.cpu_offload": Key(offload_param),
    **absent(
        """
        output_dir num_train_epochs lr_scheduler_kwargs.* lr_scheduler_kwargs optim_args optim_target_modules
        torch_compile_backend average_tokens_across_devices label_smoothing_factor bf16_full_eval fp16_full_eval
        use_cache deepspeed fsdp_config activation_checkpointing_kwargs.* gradient_checkpointing_kwargs.*
        activation_checkpointing_kwargs torch_empty_cache_steps gradient_checkpointing_kwargs logging_strategy
        logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen
        log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
        trackio_static_space_id eval_strategy eval_steps eval_delay prediction_loss_only eval_on_start
        eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics save_only_model
        save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token
        hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end
        metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint
        data_seed accelerator_config accelerator_config.* dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context remove_unused_columns
        label_names train_sampling_strategy length_column_name ddp_broadcast_buffers ddp_static_graph
        ddp_backend ddp_timeout debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
        local_rank fsdp_config.xla_fsdp_settings.* fsdp_config.xla_fsdp_settings fsdp_config.xla_fsdp_v2
        fsdp_config.xla_fsdp_grad_ckpt fsdp_config.xla use_liger_kernel liger_kernel_config.* liger_kernel_config
        parallelism_config.* parallelism_config
        """,
    ),
    **absent("per_device_eval_batch_size eval_accumulation_steps", note="evaluation is not part of the plan"),
    **absent("auto_find_batch_size", note="a batch that does not fit is made smaller: planned is the first"),
    **absent("neftune_noise_alpha", note="the noise is one more copy of the embedding's output"),
}
TRAINER_DEFAULTS: Settings = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "seed": 42,
}

# peft's adapter_config.json


def targets(value: Any) -> str | list[str]:
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return sorted(value)  # peft writes a set
    if not isinstance(value, str) or not value:
        raise WrongValue("it is neither a name, nor a pattern, nor a list of names")
    return value


PEFT: dict[str, Key] = {
    "peft_type": one_of("adapter.type", {"lora": "lora"}),
    **named("r lora_alpha lora_dropout use_rslora"),
    **named("target_modules", targets),
    "bias": unless_off("biases are trained too"),
    "modules_to_save": unless_off("whole modules are trained too"),
    **dict.fromkeys(
        ("rank_pattern.*", "alpha_pattern.*", "layer_replication", "layers_to_transform", "exclude_modules"),
        unless_off("layers of different ranks or values, which shardkit's adapters do not have"),
    ),
    **dict.fromkeys(
        (
            "use_dora", "use_qalora", "use_bdlora", "use_bdlora.*", "lora_bias", "trainable_token_indices",
            "trainable_token_indices.*", "target_parameters", "velora_config", "velora_config.*", "monteclora_config",
            "monteclora_config.*", "kasa_config", "kasa_config.*", "arrow_config", "arrow_config.*",
        ),
        unless_off("it adds memory that shardkit's adapters do not have"),
    ),
    **absent(
        """
        task_type auto_mapping auto_mapping.* base_model_name_or_path revision inference_mode peft_version
        fan_in_fan_out init_lora_weights layers_pattern megatron_config megatron_config.* megatron_core loftq_config
        loftq_config.* eva_config eva_config.* corda_config corda_config.* lora_ga_config lora_ga_config.*
        alora_invocation_tokens qalora_group_size runtime_config runtime_config.* ensure_weight_tying rank_pattern
        alpha_pattern
        """,
    ),
}  # fmt: skip
PEFT_DEFAULTS: Settings = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False}

MUST_MATCH = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "deepspeed_config.gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Keys of DeepSpeed → the Trainer's argument that has to be equal."""
RENAMED = {
    "accelerate": {
        "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
        "deepspeed_config.stage3_gather_16bit_weights_on_model_save": "deepspeed_config.zero3_save_16bit_model",
    },
    "deepspeed": {
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": GATHER,
        "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
        "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    },
    "trainer": {
        "evaluation_strategy": "eval_strategy",
        "per_gpu_train_batch_size": "per_device_train_batch_size",
        "per_gpu_eval_batch_size": "per_device_eval_batch_size",
        "no_cuda": "use_cpu",
        "warmup_ratio": "warmup_steps",
        "group_by_length": "train_sampling_strategy",
        "fsdp_transformer_layer_cls_to_wrap": "fsdp_config.transformer_layer_cls_to_wrap",
        "fsdp_min_num_params": "fsdp_config.min_num_params",
    },
    "peft": {"alpha": "lora_alpha", "dropout": "lora_dropout", "rank": "r", "targets": "target_modules"},
}
"""Names of earlier versions, or of a neighbour's file → the names to write instead."""
