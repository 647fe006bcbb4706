"""Keys of TRL 1.9's scripts beside the Trainer's, and the keys here that say the same."""

from __future__ import annotations

from typing import Any

from ..config.names import HERE
from . import tables
from .axolotl import attention, schedule
from .tables import Key, NoCounterpart, Settings, WrongValue, absent, accepted, named, truth, unplanned

_REWARDS = "it belongs to a trainer of pairs, rewards or generated answers, whose batches no plan here has"
_CHUNK = 256
"""Tokens of a chunk of TRL's chunked loss."""


def _targets(value: Any) -> str | list[str]:
    names = value if isinstance(value, (list, str)) else [value]
    return "all-linear" if names in ("all-linear", ["all-linear"]) else tables.targets(names)


def _dtype(value: Any) -> Settings:
    if str(value).removeprefix("torch.") not in ("auto", "float32", "float16", "bfloat16"):
        raise WrongValue("it is none of auto, float32, float16, bfloat16")
    return {}


def _loss(value: Any) -> Settings:
    if value not in ("nll", "chunked_nll"):
        raise NoCounterpart("another loss keeps other outputs, or belongs to a trainer of pairs or rewards")
    return {"model.loss_chunk_size": _CHUNK} if value == "chunked_nll" else {}


_DTYPE = Key(_dtype, note="the type in which the weights are loaded", only=HERE["dtype"])
EARLIER: dict[str, Key] = {
    **absent(
        """
        group_by_length per_gpu_eval_batch_size warmup_ratio overwrite_output_dir logging_dir save_safetensors
        use_mps_device jit_mode_eval use_ipex half_precision_backend fp16_backend fp16_opt_level tpu_num_cores
        tpu_metrics_debug past_index include_inputs_for_metrics use_legacy_prediction_loop push_to_hub_model_id
        push_to_hub_organization push_to_hub_token mp_parameters torchdynamo ray_scope dispatch_batches
        split_batches include_tokens_per_second evaluation_strategy fsdp_min_num_params
        """
    ),
    "no_cuda": Key(lambda value: tables.on("run.device", "cpu", value)),
    "fsdp_transformer_layer_cls_to_wrap": Key(tables.classes),
    **named("per_gpu_train_batch_size"),
}
"""Arguments of transformers 4's Trainer, which TRL and LLaMA-Factory run on too."""
TRL_KEYS: dict[str, Key] = {
    **accepted("model_name_or_path", "the model"),
    "use_peft": Key(lambda value: {"adapter.type": "lora" if truth(value) else "none"}),
    **named("lora_r lora_alpha lora_dropout use_rslora max_length max_seq_length"),
    **named("lora_target_modules", _targets),
    **accepted("packing padding_free", tables.ROWS),
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "attn_implementation": Key(attention),
    "lr_scheduler_type": Key(schedule),
    **absent(
        """
        model_revision trust_remote_code chat_template_path dataset_text_field dataset_kwargs dataset_kwargs.*
        dataset_num_proc dataset_batch_size eos_token pad_token truncation_mode shuffle_dataset packing_strategy
        pad_to_multiple_of completion_only_loss assistant_only_loss dataset_name dataset_config
        dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers datasets streaming
        test_split_size lora_task_type bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
        gradient_checkpointing_use_reentrant num_of_sequences skip_prepare_dataset env env.* config
        """
    ),
    **absent("eval_packing", note="evaluation is not part of the plan"),
    **unplanned("the model that is made differs from its config.json", "model_init_kwargs model_init_kwargs.*"),
    **unplanned("router losses keep more activations", "router_aux_loss_coef"),
    "loss_type": Key(_loss),
    **unplanned("activations move to the host in an order of its own", "activation_offloading"),
    **unplanned(
        "it trains more, or stores adapters otherwise, than peft's plain LoRA",
        "lora_target_parameters lora_modules_to_save use_dora",
    ),
    **unplanned("the model's weights are stored in fewer bits", "load_in_8bit load_in_4bit"),
    **unplanned(
        _REWARDS,
        """
        disable_dropout precompute_ref_log_probs precompute_ref_batch_size loss_weights ld_alpha f_divergence_type
        f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau sync_ref_model ref_model_mixup_alpha
        ref_model_sync_steps cast_lm_head_to_fp32 num_generations num_generations_eval max_completion_length
        max_prompt_length ds3_gather_for_generation generation_batch_size steps_per_generation temperature top_p
        top_k min_p generation_kwargs generation_kwargs.* chat_template_kwargs chat_template_kwargs.*
        repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
        vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size num_iterations
        epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
        vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
        mask_truncated_completions top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min
        entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
        vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions
        log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
        use_transformers_continuous_batching transformers_continuous_batching_config
        transformers_continuous_batching_config.* use_transformers_paged vllm_importance_sampling_cap
        desirable_weight undesirable_weight center_rewards_coefficient normalize_advantages reward_clip_range
        reward_model_name_or_path reward_funcs num_ppo_epochs missing_eos_penalty
        """,
    ),
}
"""Keys of SFTConfig, the other trainers' configs, ModelConfig and ScriptArguments."""
TRL: dict[str, Key] = {**tables.TRAINER, **EARLIER, **TRL_KEYS}
TRL_DEFAULTS: Settings = {
    **tables.TRAINER_DEFAULTS,
    "learning_rate": 2e-5,
    "max_length": 1024,
    "gradient_checkpointing": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
}
"""Of SFTConfig and ModelConfig; bf16 is on unless fp16 is."""
TRL_MARKS = ("use_peft", "lora_r", "lora_target_modules", "max_length", "max_seq_length", "packing", "padding_free",
             "dataset_text_field", "assistant_only_loss", "completion_only_loss", "packing_strategy")  # fmt: skip
"""A Trainer's file with one of these is of TRL's scripts."""
