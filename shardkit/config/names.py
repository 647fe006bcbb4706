"""What other tools call keys here: `errors` suggests a key by it, and `foreign` plans by it. Pure data.

DeepSpeed's names with sections are dotted, as its file has them.
"""

OTHER_NAMES = {
    "activation.policy": "gradient_checkpointing activation_checkpointing",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.r": "r lora_r lora_rank",
    "adapter.targets": "target_modules lora_target_modules lora_target",
    "adapter.use_rslora": "use_rslora peft_use_rslora",
    "checkpoint.every_steps": "save_steps",
    "compile.enabled": "torch_compile",
    "compile.mode": "dynamo_mode torch_compile_mode",
    "data.drop_last": "dataloader_drop_last",
    "data.workers": "dataloader_num_workers",
    "logging.every": "logging_steps logging.every_steps",
    "model.d_model": "hidden_size",
    "optim.betas.0": "adam_beta1",
    "optim.betas.1": "adam_beta2",
    "optim.eps": "adam_epsilon optimizer.params.eps",
    "optim.lr": "learning_rate optimizer.params.lr scheduler.params.warmup_max_lr",
    "optim.min_lr_ratio": "cosine_min_lr_ratio scheduler.params.cos_min_ratio lr_scheduler_kwargs.min_lr_rate",
    "optim.name": "optimizer.type",
    "optim.schedule": "lr_scheduler_type schedule.name",
    "optim.warmup_steps": "warmup_ratio scheduler.params.warmup_num_steps",
    "optim.weight_decay": "weight_decay optimizer.params.weight_decay",
    "parallel.bucket_mb": "ddp_bucket_cap_mb",
    "parallel.find_unused": "ddp_find_unused_parameters",
    "parallel.hpz": "zero_optimization.zero_hpz_partition_size",
    "parallel.nvme_path": "zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path",
    "parallel.offload_optimizer": "offload_optimizer_device zero_optimization.offload_optimizer.device",
    "parallel.offload_param": "offload_param_device zero_optimization.offload_param.device",
    "parallel.offload_ratio": "zero_optimization.offload_optimizer.ratio",
    "parallel.strategy": "zero_stage zero_optimization.stage",
    "precision.loss_scale_init_power": "fp16.initial_scale_power",
    "precision.loss_scale_window": "fp16.loss_scale_window",
    "precision.mode": "dtype torch_dtype amp",
    "precision.reduce_dtype": "communication_data_type",
    "run.dir": "output_dir",
    "train.deterministic": "full_determinism",
    "train.eval_every": "eval_steps eval.every eval.every_steps",
    "train.global_batch_size": "train_batch_size",
    "train.grad_accum_steps": "gradient_accumulation_steps",
    "train.max_norm": "max_grad_norm gradient_clipping clip_grad_norm",
    "train.max_steps": "scheduler.params.total_num_steps",
    "train.micro_batch_size": "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
    "batch_size micro_batch_size",
    "train.seed": "seed",
    "train.seq_len": "max_length max_seq_length sequence_len cutoff_len block_size",
}
"""A key here → other tools' names for it, and names of keys that stood elsewhere."""
HERE = {name: key for key, names in OTHER_NAMES.items() for name in names.split()}
"""Another tool's name → the key here."""
