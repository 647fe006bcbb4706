"""Write a config of shardkit as a file of another tool; a value that the tool cannot say is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from ...errors import ConfigError
from ..errors import shown
from ..layers import merged
from ..load import resolve_batch
from ..schema import RunConfig
from .files import family
from .tables import AUTO, STAGES

To = Literal["accelerate", "deepspeed", "trainer"]
_STAGE = {name: stage for stage, name in STAGES.items() if stage}


@dataclass(frozen=True)
class Written:
    """A file of another tool.

    Attributes:
        text: YAML, or JSON for DeepSpeed.
        unsaid: settings that differ from shardkit's defaults and have no key there.
    """

    text: str
    unsaid: tuple[str, ...]


def write(config: RunConfig, to: To, gpus: int = 1, gpus_per_node: int = 8) -> Written:
    """The config as a file of Accelerate, DeepSpeed, or the Trainer (whose file has DeepSpeed's in it).

    Raises:
        ConfigError: the tool has no value for a setting that decides what is trained; names it.
    """
    ours = _Ours(config, to)
    accum = resolve_batch(config, gpus)
    if to != "accelerate" or config.parallel.strategy in _STAGE:
        ours.used |= {"train.grad_accum_steps", "train.global_batch_size"}
    if to == "accelerate":
        tree = _accelerate(ours, accum, gpus, gpus_per_node)
    elif to == "deepspeed":
        tree = _deepspeed(ours, accum)
    else:
        tree = _trainer(ours, accum)
    text = json.dumps(tree, indent=2) if to == "deepspeed" else yaml.safe_dump(tree, sort_keys=False)
    return Written(text.rstrip() + "\n", ours.unsaid())


class _Ours:
    """Reads the config, and remembers what was read."""

    def __init__(self, config: RunConfig, to: To) -> None:
        self.config, self.to, self.used = config, to, set[str]()
        self.strategy = config.parallel.strategy

    def __call__(self, key: str) -> Any:
        self.used.add(key)
        section, _, name = key.partition(".")
        return getattr(getattr(self.config, section), name)

    def refuse(self, key: str, why: str, fix: str) -> ConfigError:
        return ConfigError(f"{key}={shown(self(key))} cannot be said in {family(self.to)}'s file: {why}", fix)

    def one_of(self, key: str, values: dict[str, Any]) -> Any:
        """The tool's value for ours."""
        value = self(key)
        if value not in values:
            raise self.refuse(key, f"it has only {', '.join(values)}", f"set {key} to one of them")
        return values[value]

    def default_only(self, *keys: str, fix: str = "") -> None:
        """Refuse settings that change the training and that the tool does not have."""
        for key in keys:
            section, _, name = key.partition(".")
            if self(key) != type(getattr(self.config, section)).model_fields[name].default:
                raise self.refuse(key, "it has no such key", fix or f"remove {key}")

    def unsaid(self) -> tuple[str, ...]:
        found = []
        for section, keys in self.config.model_dump().items():
            fields = type(getattr(self.config, section)).model_fields
            for key, value in keys.items():
                dotted = f"{section}.{key}"
                default = fields[key].get_default(call_default_factory=True)
                default = list(default) if isinstance(default, tuple) else default
                value = list(value) if isinstance(value, tuple) else value
                if dotted not in self.used and value != default:
                    found.append(f"{dotted}={shown(value)}")
        return tuple(found)


def _half(ours: _Ours) -> str:
    """`fp16`, `bf16`, or empty."""
    half: str = ours.one_of("precision.mode", {"fp32": "", "tf32": "", "fp16": "fp16", "bf16": "bf16"})
    return half


def _recomputes(ours: _Ours) -> bool:
    whole: bool = ours.one_of("activation.policy", {"none": False, "full": True})
    return whole


def _accelerate(ours: _Ours, accum: int, gpus: int, per_node: int) -> dict[str, Any]:
    kinds = {"single": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP", "hsdp": "FSDP", **dict.fromkeys(_STAGE, "DEEPSPEED")}
    on_cpu = ours("run.device") == "cpu"
    kind = kinds[ours("parallel.strategy")]
    if ours("precision.mode") == "tf32":
        raise ours.refuse("precision.mode", "the script decides it", "set precision.mode=fp32")
    tree: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_CPU" if on_cpu and kind == "MULTI_GPU" else kind,
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": _half(ours) or "no",
        "num_machines": max(1, gpus // per_node),
        "num_processes": gpus,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": on_cpu,
    }
    if kind == "FSDP":
        tree["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": _recomputes(ours),
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": ours("parallel.offload_param") == "cpu",
            "fsdp_reshard_after_forward": ours("parallel.reshard_after_forward"),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if ours.config.activation.block_classes:
            names = ",".join(ours("activation.block_classes"))
            tree["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = names
    if ours.strategy == "hsdp":
        shard = ours("parallel.dp_shard") or min(gpus, per_node)
        replicate = ours("parallel.dp_replicate") or gpus // shard
        ours("parallel.dp_replicate")
        tree["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": replicate, "parallelism_config_dp_shard_size": shard,
        }  # fmt: skip
    if kind == "DEEPSPEED":
        ours.default_only(
            "parallel.ds_config", "parallel.bucket_mb", "parallel.hpz", "parallel.offload_ratio",
            fix="pass --to deepspeed, and name that file as deepspeed_config_file in Accelerate's",
        )  # fmt: skip
        three = ours.strategy == "zero3"
        tree["deepspeed_config"] = {
            "zero_stage": _STAGE[ours.strategy],
            "gradient_accumulation_steps": accum,
            "gradient_clipping": ours("train.max_norm") or 0.0,
            "offload_optimizer_device": ours("parallel.offload_optimizer"),
            "offload_param_device": ours("parallel.offload_param"),
            "zero3_init_flag": three,
            "zero3_save_16bit_model": three,
        }
        for part in ("optimizer", "param"):
            if tree["deepspeed_config"][f"offload_{part}_device"] == "nvme":
                tree["deepspeed_config"][f"offload_{part}_nvme_path"] = ours("parallel.nvme_path")
    if ours("compile.enabled"):
        tree["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_mode": ours("compile.mode")}
    return tree


def _deepspeed(ours: _Ours, accum: int) -> dict[str, Any]:
    if ours.strategy not in _STAGE:
        raise ours.refuse(
            "parallel.strategy",
            "DeepSpeed has ZeRO",
            "set parallel.strategy to zero1, zero2 or zero3, or --to accelerate",
        )
    ours.used.add("parallel.strategy")
    ours.default_only("optim.in_backward", "train.ema_decay")
    tree: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ours("train.micro_batch_size"),
        "gradient_accumulation_steps": accum,
        "gradient_clipping": ours("train.max_norm") or 0.0,
        **_engine(ours),
        "optimizer": {
            "type": ours.one_of("optim.name", {"adamw": "AdamW"}),
            "params": {
                "lr": ours("optim.lr"),
                "betas": list(ours("optim.betas")),
                "eps": ours("optim.eps"),
                "weight_decay": ours("optim.weight_decay"),
            },
        },
        "scheduler": _schedule(ours),
    }
    return tree


def _engine(ours: _Ours) -> dict[str, Any]:
    """DeepSpeed's precision and ZeRO sections, raw keys included."""
    half = _half(ours)
    zero: dict[str, Any] = {"stage": _STAGE[ours.strategy]}
    for part in ("optimizer", "param"):
        device = ours(f"parallel.offload_{part}")
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
            if device == "nvme":
                zero[f"offload_{part}"]["nvme_path"] = ours("parallel.nvme_path")
    if ours("parallel.offload_ratio") != 1:
        zero["offload_optimizer"]["ratio"] = ours("parallel.offload_ratio")
    if ours("parallel.hpz") is not None:
        zero["zero_hpz_partition_size"] = ours("parallel.hpz")
    if ours("parallel.bucket_mb") is not None:
        elements = int(ours("parallel.bucket_mb") * 2**20 / (2 if half else 4)) // 2 * 2
        zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if ours.strategy == "zero3":
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    tree: dict[str, Any] = {"zero_optimization": zero}
    if half == "fp16":
        tree["fp16"] = {
            "enabled": True,
            "initial_scale_power": ours("precision.loss_scale_init_power"),
            "loss_scale_window": ours("precision.loss_scale_window"),
            "hysteresis": 1,
        }
    elif half == "bf16":
        tree["bf16"] = {"enabled": True}
    if ours("precision.reduce_dtype") != "auto":
        tree["communication_data_type"] = ours("precision.reduce_dtype")
    return merged(tree, ours("parallel.ds_config"))


def _schedule(ours: _Ours) -> dict[str, Any]:
    kind = ours.one_of(
        "optim.schedule", {"cosine": "WarmupCosineLR", "linear": "WarmupDecayLR", "constant": "WarmupLR"}
    )
    floor = ours("optim.min_lr_ratio")
    params: dict[str, Any] = {"warmup_num_steps": max(1, ours("optim.warmup_steps")), "warmup_type": "linear"}
    if kind == "WarmupCosineLR":
        params |= {"total_num_steps": ours("train.max_steps"), "warmup_min_ratio": 0.0, "cos_min_ratio": floor}
    else:
        params |= {"warmup_min_lr": 0.0, "warmup_max_lr": ours("optim.lr")}
    if kind == "WarmupDecayLR":
        params["total_num_steps"] = ours("train.max_steps")
        if floor:
            raise ours.refuse("optim.min_lr_ratio", "WarmupDecayLR ends at 0", "set optim.min_lr_ratio=0, or cosine")
    return {"type": kind, "params": params}


def _trainer(ours: _Ours, accum: int) -> dict[str, Any]:
    ours.default_only("optim.in_backward", "train.ema_decay", "optim.momentum", "activation.offload")
    if ours("parallel.strategy") == "hsdp":
        raise ours.refuse("parallel.strategy", "its file has no mesh", "set parallel.strategy=fsdp, or --to accelerate")
    half = _half(ours)
    fused = ours("optim.implementation") in ("auto", "fused")
    adamw = "adamw_torch_fused" if fused else "adamw_torch"
    tree: dict[str, Any] = {
        "output_dir": ours("run.dir"),
        "per_device_train_batch_size": ours("train.micro_batch_size"),
        "gradient_accumulation_steps": accum,
        "max_steps": ours("train.max_steps"),
        "max_grad_norm": ours("train.max_norm") or 0.0,
        "optim": ours.one_of("optim.name", {"adamw": adamw, "sgd": "sgd", "adamw8bit": "adamw_torch_8bit"}),
        "learning_rate": ours("optim.lr"),
        "weight_decay": ours("optim.weight_decay"),
        "adam_beta1": ours("optim.betas")[0],
        "adam_beta2": ours("optim.betas")[1],
        "adam_epsilon": ours("optim.eps"),
        **_trainer_schedule(ours),
        "warmup_steps": ours("optim.warmup_steps"),
        "seed": ours("train.seed"),
        "dataloader_num_workers": ours("data.workers"),
        "dataloader_drop_last": ours("data.drop_last"),
    }
    if half:
        tree[half] = True
    if ours("precision.mode") == "tf32":
        tree["tf32"] = True
    if ours("run.device") == "cpu":
        tree["use_cpu"] = True
    if ours("train.deterministic"):
        tree["full_determinism"] = True
    if ours("compile.enabled"):
        tree |= {"torch_compile": True, "torch_compile_mode": ours("compile.mode")}
    if ours("checkpoint.every_steps"):
        tree |= {"save_strategy": "steps", "save_steps": ours("checkpoint.every_steps")}
        tree["save_total_limit"] = ours("checkpoint.keep_last")
    return tree | _trainer_engine(ours)


def _trainer_schedule(ours: _Ours) -> dict[str, Any]:
    kind, floor = ours("optim.schedule"), ours("optim.min_lr_ratio")
    if kind == "constant":
        return {"lr_scheduler_type": "constant_with_warmup" if ours("optim.warmup_steps") else "constant"}
    if kind == "cosine" and floor:
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": floor}}
    if floor:
        raise ours.refuse("optim.min_lr_ratio", "its linear schedule ends at 0", "set optim.min_lr_ratio=0, or cosine")
    return {"lr_scheduler_type": kind}


def _trainer_engine(ours: _Ours) -> dict[str, Any]:
    """How state is spread over ranks, and what backward recomputes."""
    recomputes = _recomputes(ours)
    if ours.strategy == "fsdp":
        options: dict[str, Any] = {
            "version": 2,
            "reshard_after_forward": ours("parallel.reshard_after_forward"),
            "cpu_offload": ours("parallel.offload_param") == "cpu",
            "activation_checkpointing": recomputes,
        }
        if ours.config.activation.block_classes:
            options["transformer_layer_cls_to_wrap"] = list(ours("activation.block_classes"))
        return {"fsdp": True, "fsdp_config": options}
    tree: dict[str, Any] = {"gradient_checkpointing": True} if recomputes else {}
    if ours.strategy in _STAGE:
        half = _half(ours)
        engine = _engine(ours) | ({half: {**_engine(ours)[half], "enabled": AUTO}} if half else {})
        keys = (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
            "gradient_clipping",
        )
        tree["deepspeed"] = {**dict.fromkeys(keys, AUTO), **engine}
    if ours.strategy == "ddp":
        if ours("parallel.find_unused") is not None:
            tree["ddp_find_unused_parameters"] = ours("parallel.find_unused")
        if ours("parallel.bucket_mb") is not None:
            tree["ddp_bucket_cap_mb"] = int(ours("parallel.bucket_mb"))
    return tree
