"""What other tools call keys here: `errors` suggests a key by it, and `foreign` plans by it. Pure data.

Names that stand in a section of a tool's file mean nothing without it: `foreign/tables.py` alone has them.
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
    "optim.eps": "adam_epsilon",
    "optim.lr": "learning_rate",
    "optim.min_lr_ratio": "cosine_min_lr_ratio",
    "optim.schedule": "lr_scheduler_type schedule.name",
    "optim.warmup_steps": "warmup_ratio",
    "optim.weight_decay": "weight_decay",
    "parallel.bucket_mb": "ddp_bucket_cap_mb",
    "parallel.find_unused": "ddp_find_unused_parameters",
    "parallel.offload_optimizer": "offload_optimizer_device",
    "parallel.offload_param": "offload_param_device",
    "parallel.strategy": "zero_stage",
    "precision.mode": "dtype torch_dtype amp",
    "precision.reduce_dtype": "communication_data_type",
    "run.dir": "output_dir",
    "train.deterministic": "full_determinism",
    "train.eval_every": "eval_steps eval.every eval.every_steps",
    "train.global_batch_size": "train_batch_size",
    "train.grad_accum_steps": "gradient_accumulation_steps",
    "train.max_norm": "max_grad_norm gradient_clipping clip_grad_norm",
    "train.micro_batch_size": "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu "
    "batch_size micro_batch_size",
    "train.seed": "seed",
    "train.seq_len": "max_length max_seq_length sequence_len cutoff_len block_size",
}
"""A key here → other tools' names for it, and where it stood or is looked for."""
HERE = {name: key for key, names in OTHER_NAMES.items() for name in names.split()}
"""Another tool's name → the key here."""
