"""Keys of axolotl 0.18's recipes, and the keys here that say the same. Pure data but for a few converters."""

from __future__ import annotations

from typing import Any

from ..config.names import HERE
from . import tables
from .tables import (
    Key,
    NoCounterpart,
    Settings,
    WrongValue,
    absent,
    accepted,
    number,
    one_of,
    to,
    truth,
    unplanned,
)

_REWARDS = "it trains with pairs, rewards or generated answers, whose batches and second model no plan here has"
_KERNELS = "kernels of its own keep other activations"
_ATTENTION = "its attention keeps other memory than torch's scaled_dot_product_attention"
_ADAPTERS = "its adapters train more, or store them otherwise, than peft's plain LoRA"
_OFFLOAD = "activations or layers move to the host or a disk in an order of its own"
_TEACHER = "a teacher's outputs, other losses or masks come on top"
_BITS = "the model's weights are stored in fewer bits"
_FROZEN = "a part of the model alone is trained"


def learning_rate(value: Any) -> float:
    """A number, or text that is one, which axolotl converts."""
    try:
        return number(float(value) if isinstance(value, str) else value)
    except ValueError:
        raise WrongValue("it is not a number") from None


def schedule(value: Any) -> Settings:
    """A learning-rate schedule; one without a counterpart changes no memory and sets nothing."""
    return dict(tables.SCHEDULES.get(str(value).lower(), {}))


def optimizer(value: Any) -> Settings:
    """An optimizer by its name in the Trainer or in axolotl.

    Raises:
        NoCounterpart: shardkit has none with the same state.
    """
    optimizers = {**tables.OPTIMIZERS, "ao_adamw_8bit": {"optim.name": "adamw8bit"}, "muon": {"optim.name": "muon"}}
    settings = optimizers.get(str(value).lower())
    if settings is None:
        raise NoCounterpart(f"the optimizer's state is planned as AdamW's: shardkit has only {', '.join(optimizers)}")
    return dict(settings)


def attention(value: Any) -> Settings:
    """Attention by name; those that keep nothing of size tokens × tokens are planned alike."""
    if value in (None, "", "sdpa", "auto") or "flash" in str(value) or value in ("fa2", "fa3", "xformers"):
        return {}
    raise NoCounterpart(_ATTENTION)


def _half(name: str) -> Key:
    return Key(lambda value: {name: value == "auto" or value == "full" or truth(value)})


def _checkpointing(value: Any) -> Settings:
    if isinstance(value, str) and value.lower() in ("offload", "offload_disk", "unsloth"):
        raise NoCounterpart(_OFFLOAD)
    return tables.recompute(value)


def _adapter(value: Any) -> Settings:
    if value in ("lora", "qlora"):
        return {"adapter.type": "lora"}
    raise NoCounterpart(_ADAPTERS)


def _four_bits(switch: Any) -> Settings:
    return {"model.quantize.bits": 4} if truth(switch) else {}


def _targets(value: Any) -> Settings:
    if value == "all-linear" or (isinstance(value, list) and "all-linear" in value):
        return {"adapter.targets": "all-linear"}
    return {"adapter.targets": tables.targets(value)}


def _autocast(value: Any) -> Settings:
    if not truth(value):
        raise NoCounterpart("adapters keep the type of the model, and are no fp32 values")
    return {}


def _plugins(value: Any) -> Settings:
    names = [str(name).rpartition(".")[2] for name in (value if isinstance(value, list) else [value])]
    strange = [name for name in names if name not in ("LigerPlugin", "LMEvalPlugin", "SwanLabPlugin")]
    if strange:
        raise NoCounterpart(f"{', '.join(strange)} may change the model, the loss or the optimizer")
    return {}


_OF_THE_TRAINER = (
    "gradient_accumulation_steps", "max_steps", "max_grad_norm", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "warmup_steps", "seed", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "dataloader_num_workers",
    "dataloader_drop_last", "fsdp",
)  # fmt: skip
AXOLOTL: dict[str, Key] = {
    **{key: tables.TRAINER[key] for key in _OF_THE_TRAINER},
    **accepted("base_model", "the model"),
    **tables.named("micro_batch_size sequence_len cosine_min_lr_ratio torch_compile_mode"),
    **tables.named("lora_r lora_alpha lora_dropout peft_use_rslora"),
    **accepted("sample_packing pad_to_sequence_len batch_flattening pretraining_sample_concatenation", tables.ROWS),
    **tables.named("learning_rate", learning_rate),
    "optimizer": Key(optimizer, only="optim.name"),
    "lr_scheduler": Key(schedule),
    "bf16": _half("bf16"),
    "fp16": _half("fp16"),
    "tf32": _half("tf32"),
    **accepted("bfloat16 float16", "the type of weights and optimizer state", "precision.mode"),
    "gradient_checkpointing": Key(_checkpointing, only="activation.policy"),
    "torch_compile": Key(lambda value: {} if value == "auto" else {"compile.enabled": truth(value)}),
    "attn_implementation": Key(attention),
    "adapter": Key(_adapter, only="adapter.type"),
    "load_in_4bit": Key(_four_bits),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": to("model.quantize.double", truth),
    "bnb_config_kwargs.bnb_4bit_quant_type": one_of("model.quantize.type", tables.FOUR_BITS),
    "lora_target_modules": Key(_targets, only=HERE["lora_target_modules"]),
    "lora_target_linear": Key(lambda value: tables.on("adapter.targets", "all-linear", value)),
    "dp_replicate_size": Key(tables.replicas),
    "dp_shard_size": Key(tables.shards),
    **{f"fsdp_config.{name}": key for name, key in tables.FSDP.items()},
    "fsdp_config.offload_params": Key(tables.offload_param),
    "plugins": Key(_plugins),
    **absent(
        """
        bnb_config_kwargs.bnb_4bit_quant_storage fsdp_version fsdp_config.fsdp_version
        fsdp_final_state_dict_type fsdp_config.final_state_dict_type fsdp_config.cpu_offload_pin_memory
        fsdp_config.mixed_precision_policy fsdp_config deepspeed strict resume_from_checkpoint
        auto_resume_from_checkpoints mean_resizing_embeddings datasets test_datasets shuffle_merged_datasets
        shuffle_before_merging_datasets dataset_prepared_path dataset_shard_num dataset_shard_idx
        skip_prepare_dataset num_dataset_shards_to_save pretraining_dataset dataset_processes dataset_num_proc
        dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory dataloader_prefetch_factor
        accelerator_config accelerator_config.* remove_unused_columns push_dataset_to_hub hf_use_auth_token
        device device_map device_map.* world_size local_rank ddp ddp_timeout ddp_broadcast_buffers
        metric_for_best_model greater_is_better loss_watchdog_threshold loss_watchdog_patience gc_steps
        torch_empty_cache_steps gc_collect_steps float32 gradient_checkpointing_kwargs
        gradient_checkpointing_kwargs.* excess_length_strategy min_sample_len sample_packing_group_size
        sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method pad_to_multiple_of
        curriculum_sampling multipack_real_batches pretrain_multipack_buffer_size pretrain_multipack_attn
        streaming streaming_multipack_buffer_size xformers_attention sdp_attention flash_attention
        flex_attn_compile_kwargs flex_attn_compile_kwargs.* large_head_attention flash_attn_d512 sdpa_varlen
        val_set_size special_tokens special_tokens.* tokens added_tokens_overrides added_tokens_overrides.*
        torch_compile_backend torch_compile_options torch_compile_options.* warmup_ratio save_steps
        saves_per_epoch save_strategy save_total_limit save_first_step logging_steps early_stopping_patience
        load_best_model_at_end save_only_model use_tensorboard profiler_steps profiler_steps_start
        include_tokens_per_second include_tkps max_memory max_memory.* gpu_memory_limit low_cpu_mem_usage
        chat_template chat_template_jinja chat_template_kwargs chat_template_kwargs.* eot_tokens
        default_system_message fix_untrained_tokens is_preprocess preprocess_iterable total_num_tokens
        total_supervised_tokens sample_packing_eff_est axolotl_config_path is_falcon_derived_model
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model generate_samples
        num_generation_samples generation_max_new_tokens generation_temperature generation_top_p
        generation_top_k generation_prompt_ratio generation_do_sample dynamic_checkpoint dynamic_checkpoint.*
        use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_wandb
        wandb_name wandb_run_id wandb_mode wandb_project wandb_entity wandb_watch wandb_log_model use_comet
        comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online
        comet_experiment_config comet_experiment_config.* gradio_title gradio_share gradio_server_name
        gradio_server_port gradio_max_new_tokens gradio_temperature use_ray ray_run_name ray_num_workers
        resources_per_worker resources_per_worker.* use_otel_metrics otel_metrics_host otel_metrics_port
        use_trackio trackio_project_name trackio_run_name trackio_space_id base_model_config cls_model_config
        tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_type
        processor_type processor_kwargs processor_kwargs.* tokenizer_save_jinja_files trust_remote_code
        experimental_skip_move_to_device output_dir hub_model_id hub_strategy hub_revision save_safetensors
        model_type type_of_model model_revision revision_of_model image_size image_resize_algorithm
        role_boundaries batch_size train_on_inputs group_by_length embedding_lr embedding_lr_scale optim_args
        optim_args.* torchdistx_path lr_scheduler_kwargs lr_scheduler_kwargs.* lr_quadratic_warmup
        cosine_constant_lr_ratio lr_div_factor lr_groups adam_epsilon2 adam_beta3 num_epochs
        jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps lora_model_dir
        lora_fan_in_fan_out peft_layers_pattern peft_init_lora_weights peft_ensure_weight_tying lora_on_cpu
        loraplus_lr_ratio loraplus_lr_embedding merge_lora merge_method qlora_sharded_model_loading quantization
        quantization.* lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model heads_k_stride
        ring_attn_func embeddings_skip_upcast trl vllm qat ebft swanlab_project swanlab_experiment_name
        swanlab_description swanlab_mode swanlab_workspace swanlab_api_key swanlab_log_model swanlab_web_host
        swanlab_api_host swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions
        swanlab_completion_log_interval swanlab_completion_max_buffer use_swanlab liger_use_token_scaling
        auto_find_batch_size noisy_embedding_alpha eval_table_size eval_max_new_tokens peft
        expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes
        expert_parallel_token_capacity expert_parallel_fallback_on_unsupported nvfp4_merge_aware_start_step
        """
    ),
    **absent(
        """
        eval_sequence_len eval_sample_packing eval_batch_size eval_steps evals_per_epoch eval_strategy
        evaluation_strategy do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split
        """,
        note="evaluation is not part of the plan",
    ),
    **absent("resize_token_embeddings_to_32x", note="the vocabulary grows by at most 31 rows"),
    **absent("neftune_noise_alpha", note="the noise is one more copy of the embedding's output"),
    **unplanned(
        _REWARDS,
        """
        rl trl.* vllm.* ebft.* reward_model process_reward_model center_rewards_coefficient num_labels
        dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free
        dpo_loss_type dpo_loss_weights orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight
        rl_beta max_prompt_len dpo_beta nemo_gym_enabled nemo_gym_dir nemo_gym_auto_clone nemo_gym_config_paths
        nemo_gym_head_port nemo_gym_server_timeout nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_datasets
        nemo_gym_auto_start nemo_gym_model_name nemo_gym_multi_turn nemo_gym_max_turns rollout_func hatchery.*
        """,
    ),
    **unplanned(
        _KERNELS,
        """
        use_kernels lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel chunked_cross_entropy
        chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp fused_attn_kernel
        flash_attn_cross_entropy flash_attn_fuse_mlp experts_implementation
        llama4_linearized_experts cut_cross_entropy liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm
        liger_swiglu liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy expert_backend
        moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast use_scattermoe use_sonicmoe use_dsv4_kernels
        use_glm_dsa_kernels dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode
        dense_mixer
        """,
    ),
    **unplanned(
        _ATTENTION,
        """
        flex_attention flash_optimum sage_attention eager_attention gemma4_hybrid_attn_impl
        scaling_softmax scaling_softmax_factor scaling_softmax_bias
        """,
    ),
    **unplanned(
        _ADAPTERS,
        """
        lora_target_parameters lora_modules_to_save lora_rank_pattern.* lora_alpha_pattern.* lora_rank_pattern
        lora_alpha_pattern peft_layers_to_transform peft.* peft_use_dora peft_layer_replication
        peft_trainable_token_indices peft_trainable_token_indices.* relora relora_prune_ratio relora_prune_method
        relora_cpu_offload mora.*
        """,
    ),
    "peft_autocast_adapter_dtype": Key(_autocast),
    **unplanned(
        _BITS,
        """
        load_in_8bit bnb_config_kwargs bnb_config_kwargs.* gptq quantize_moe_experts qat.* fp8
        fp8_enable_fsdp_float8_all_gather
        model_quantization_config model_quantization_config_kwargs model_quantization_config_kwargs.*
        use_onebitllms llmcompressor.* nonexpert_quantization dsv4_fp8_nonexpert_mode gemma4_fp8_nonexpert
        gemma4_nf4_nonexpert nvfp4_merge_aware
        """,
    ),
    **unplanned(_OFFLOAD, "activation_offloading layer_offloading selective_checkpointing selective_checkpointing.*"),
    **unplanned(
        _TEACHER,
        """
        kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_server_base_url
        kd_online_topk kd_online_server kd_online_timeout kd_temperature_min use_eaft eaft_alpha eaft_k diffusion.*
        grokfast_alpha grokfast_lamb trainer_cls
        """,
    ),
    **unplanned(
        _FROZEN,
        """
        unfrozen_parameters freeze_mm_modules lisa_n_layers lisa_step_interval lisa_layers_attribute
        spectrum_top_fraction spectrum_model_name
        """,
    ),
    **unplanned(
        "layers, experts or tokens are divided over ranks",
        "sequence_parallel_degree context_parallel_size tensor_parallel_size expert_parallel_size",
    ),
    **unplanned("the optimizer keeps other state", "optim_target_modules dion_lr dion_momentum dion_rank_fraction "
        "dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant "
        "qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size"),
    **unplanned("DeepCompile gathers and frees parameters in an order of its own", "deepcompile"),
    **unplanned("norms are kept in fp32", "fp32_norms fp32_norm_classes"),
    **unplanned("the model that is made differs from its config.json", "overrides_of_model_config "
        "overrides_of_model_config.* model_config model_config.* overrides_of_model_kwargs overrides_of_model_kwargs.* "
        "model_kwargs model_kwargs.* shrink_embeddings reinit_weights"),
    **unplanned("positions are skipped in longer samples", "use_pose pose_split_on_token_ids pose_max_context_len "
        "pose_num_chunks"),
}  # fmt: skip
AXOLOTL_REMOVED = (
    "max_packed_sequence_len", "rope_scaling", "dpo_use_logits_to_keep", "dpo_generate_during_eval", "dpo_norm_loss",
    "rpo_alpha", "s2_attention", "flash_attn_rms_norm",
)  # fmt: skip
"""Keys of earlier releases that axolotl refuses by name."""
AXOLOTL_DEFAULTS: Settings = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "sequence_len": 512,
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "bf16": "auto",
}
"""Values of keys that a recipe leaves out; clipping, betas and epsilon are the Trainer's."""
AXOLOTL_MARKS = ("micro_batch_size", "sequence_len", "datasets", "pretraining_dataset", "num_epochs", "adapter",
                 "sample_packing", "gradient_accumulation_steps", "val_set_size", "learning_rate")  # fmt: skip
"""A file with `base_model` and one of these is axolotl's."""
