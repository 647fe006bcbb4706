"""Keys of LLaMA-Factory 0.9.6's recipes beside the Trainer's, and the keys here that say the same."""

from __future__ import annotations

from typing import Any

from . import tables
from .axolotl import attention, schedule
from .tables import Key, NoCounterpart, Settings, WrongValue, absent, accepted, named, one_of, to, truth, unplanned
from .trl import EARLIER
from .unplanned import is_off

_REWARDS = "it trains with pairs or rewards, whose batches and second model no plan here has"
_MEGATRON = "Megatron's loop divides and recomputes in its own way"


def _tuning(value: Any) -> Settings:
    if value == "full":
        return {"adapter.type": "none"}
    if value != "lora":
        raise NoCounterpart("shardkit trains the whole model, or LoRA")
    return {"adapter.type": "lora"}


def _stage(value: Any) -> Settings:
    if value not in ("pt", "sft"):
        raise NoCounterpart(_REWARDS)
    return {}


def _targets(value: Any) -> str | list[str]:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names) or not names:
        raise WrongValue("it is neither a name nor a list of names")
    return "all-linear" if names == ["all"] else tables.targets(names)


def _bits(bits: Any) -> Settings:
    if is_off("quantization_bit", bits):
        return {}
    if str(bits) != "4":
        raise NoCounterpart("the model's weights are stored in fewer bits")
    return {"model.quantize.bits": 4}


def _method(method: Any) -> Settings:
    if method not in ("bnb", "bitsandbytes"):
        raise NoCounterpart("the model's weights are packed otherwise than by bitsandbytes")
    return {}


def _attention(value: Any) -> Settings:
    return attention("eager" if value == "disabled" else value)


TUNING: dict[str, Key] = {
    **accepted("model_name_or_path", "the model"),
    "stage": Key(_stage),
    "finetuning_type": Key(_tuning, only="adapter.type"),
    **named("lora_rank lora_alpha lora_dropout use_rslora cutoff_len"),
    **named("lora_target", _targets),
    "quantization_bit": Key(_bits),
    "quantization_method": Key(_method),
    "quantization_type": one_of("model.quantize.type", tables.FOUR_BITS),
    "double_quantization": to("model.quantize.double", truth),
    **accepted("packing", tables.ROWS),
    "flash_attn": Key(_attention),
    "disable_gradient_checkpointing": Key(
        lambda value: {"activation.policy": "none" if truth(value) else "full"}, only="activation.policy"
    ),
    **accepted("pure_bf16", "the type of weights and optimizer state", "precision.mode"),
    "lr_scheduler_type": Key(schedule),
    **absent(
        """
        template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history streaming buffer_size
        mix_strategy interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples
        eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset tool_format default_system
        enable_thinking preserve_thinking tokenized_path data_shared_file_system task task_dir batch_size lang n_shot
        save_dir download_mode loraplus_lr_ratio loraplus_lr_embedding pissa_iter pissa_convert create_new_adapter
        adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer split_special_tokens model_revision
        low_cpu_mem_usage init_special_tokens infer_backend offload_folder use_kv_cache infer_dtype hf_hub_token
        ms_hub_token om_hub_token print_param_status trust_remote_code use_reentrant_gc image_max_pixels
        image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen
        use_audio_in_video audio_sampling_rate export_dir export_size export_device export_quantization_bit
        export_quantization_dataset export_quantization_nsamples export_quantization_maxlen export_legacy_format
        export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config vllm_config.*
        sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_config.* sglang_lora_backend
        do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
        skip_special_tokens ray_num_workers ray_init_kwargs ray_init_kwargs.* master_addr master_port
        ray_run_name ray_storage_path ray_storage_filesystem resources_per_worker resources_per_worker.*
        placement_strategy enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps
        profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack
        profile_modules compute_accuracy disable_shuffling early_stopping_steps plot_loss
        include_effective_tokens_per_second freeze_vision_tower freeze_multi_modal_projector use_swanlab
        swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir
        swanlab_lark_webhook_url swanlab_lark_secret sortish_sampler predict_with_generate generation_max_length
        generation_num_beams generation_config quantization_device_map
        freeze_trainable_layers freeze_trainable_modules freeze_extra_modules
        module_dropout oft_rank oft_block_size oft_target galore_target galore_rank galore_update_interval
        galore_scale galore_proj_type galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale
        apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front badam_mode
        badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose
        pref_beta pref_loss pref_bco_weight dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma
        ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model_adapters
        ref_model_quantization_bit reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha
        eaft_alpha asft_alpha fp8_backend fp8_enable_fsdp_float8_all_gather kt_weight_path kt_expert_checkpoint_path
        kt_non_expert_weight_path kt_cpu_activation kt_use_lora_experts kt_lora_expert_num
        kt_lora_expert_intermediate_size kt_config kt_config.* megatron_pretrained_checkpoint export_hf_on_finish
        """
    ),
    **unplanned(_REWARDS, "pref_ftx ref_model reward_model"),
    **unplanned(
        "it trains more, or stores adapters otherwise, than peft's plain LoRA",
        "additional_target use_dora pissa_init use_llama_pro freeze_language_model",
    ),
    **unplanned("the optimizer keeps other state", "use_galore use_apollo use_badam use_adam_mini"),
    "use_muon": Key(lambda value: tables.on("optim.name", "muon", value)),
    **unplanned("kernels of its own keep other activations", "use_unsloth use_unsloth_gc enable_liger_kernel "
        "use_v1_kernels"),
    **unplanned("its attention keeps other memory than torch's scaled_dot_product_attention", "shift_attn "
        "neat_packing block_diag_attn"),
    **unplanned("the model that is made differs from its config.json", "mixture_of_depths resize_vocab add_tokens "
        "add_special_tokens new_special_tokens_config train_from_scratch rope_scaling"),
    **unplanned("router losses keep more activations", "moe_aux_loss_coef"),
    **unplanned("norms or logits are kept in fp32", "upcast_layernorm upcast_lmhead_output"),
    **unplanned("a second loss keeps more outputs", "use_dft_loss use_asft_loss use_eaft_loss"),
    **unplanned("the model's weights are stored in fewer bits", "fp8"),
    **unplanned("experts are computed on the host", "use_kt kt_num_threads kt_tp_enabled kt_backend"),
    **unplanned("tokens are divided over ranks", "use_hyper_parallel hyper_parallel_args hyper_parallel_cp_size"),
    **unplanned(
        _MEGATRON,
        """
        use_mca use_megatron_bridge megatron_bridge_args megatron_bridge_args.* tensor_model_parallel_size
        pipeline_model_parallel_size expert_model_parallel_size context_parallel_size
        virtual_pipeline_model_parallel_size sequence_parallel recompute_granularity recompute_method
        recompute_num_layers account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        bias_activation_fusion apply_rope_fusion masked_softmax_fusion cross_entropy_loss_fusion moe_grouped_gemm
        moe_token_dispatcher_type calculate_per_token_loss use_distributed_optimizer overlap_param_gather
        overlap_grad_reduce use_packed_sequences mixed_precision extra_config
        """,
    ),
}  # fmt: skip
_OF_THE_TRAINER = {key: entry for key, entry in tables.TRAINER.items() if key not in ("max_length", "max_seq_length")}
LLAMAFACTORY: dict[str, Key] = {**_OF_THE_TRAINER, **EARLIER, **TUNING}
LLAMAFACTORY_DEFAULTS: Settings = {
    **tables.TRAINER_DEFAULTS,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_dropout": 0.0,
    "lora_target": "all",
    "cutoff_len": 2048,
    "disable_gradient_checkpointing": False,
}
LLAMAFACTORY_MARKS = ("finetuning_type", "cutoff_len", "template", "lora_target", "lora_rank", "dataset_dir",
                      "infer_backend", "export_dir", "flash_attn", "quantization_bit")  # fmt: skip
"""A file with one of these is LLaMA-Factory's."""
V1_MARKS = ("train_dataset", "dist_config", "model_class", "kernel_config", "sample_backend", "init_config",
            "quant_config")  # fmt: skip
"""A file with one of these is of LLaMA-Factory's second trainer, v1."""
