"""Messages for an invalid configuration: pydantic's text, the place of the value, and the nearest known key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError, one_line
from .removed import KEYS, VALUES
from .schema import QuantizeConfig, RunConfig, SourceConfig, section_fields

Path = tuple[str, ...]
Locate = Callable[[Path], str]
"""Where the value at a path was set: `configs/fsdp.yaml:12`, `command line`, or empty for a default."""

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
    "parallel.cp": "cp_size context_parallel context_parallel_size sp_size sequence_parallel_size",
    "parallel.dp_replicate": "dp_replicate_size",
    "parallel.dp_shard": "dp_shard_size fsdp_size",
    "parallel.ep": "ep_size expert_parallel expert_parallel_size expert_model_parallel_size enable_expert_parallel",
    "parallel.find_unused": "ddp_find_unused_parameters",
    "parallel.offload_optimizer": "offload_optimizer_device",
    "parallel.offload_param": "offload_param_device",
    "parallel.strategy": "zero_stage",
    "parallel.tp": "tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size autotp_size",
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
_VALUE_SYNONYMS = {
    "gpu": "cuda",
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "disk": "nvme",
    "deepspeed": "zero3",
}


def suggest(path: Path) -> str:
    """The dotted key most likely meant by an unknown one; empty when nothing is close."""
    fields = section_fields()
    dotted = [f"{section}.{key}" for section, keys in fields.items() for key in keys]
    if known := HERE.get(".".join(path[:2])):
        return ".".join(known.split(".")[:2])
    if len(path) == 1:
        close = difflib.get_close_matches(path[0], fields, n=1, cutoff=0.7)
        return close[0] if close else _by_key(path[0], dotted)
    section, key = path[0], path[1]
    if section in fields:
        close = difflib.get_close_matches(key, fields[section], n=1, cutoff=0.75)
        close += [name for name in fields[section] if len(key) >= 3 and name.startswith(key)]
        if close:
            return f"{section}.{close[0]}"
        return _by_key(key, dotted) or _closest(f"{section}.{key}", dotted, 0.7)
    for near in difflib.get_close_matches(section, fields, n=1, cutoff=0.6):
        if f"{near}.{key}" in dotted:
            return f"{near}.{key}"
    return _by_key(key, dotted) or _closest(f"{section}.{key}", dotted, 0.6)


def _by_key(key: str, dotted: Iterable[str]) -> str:
    """Match on the part after the section, in whichever section has it."""
    if known := HERE.get(key):
        return ".".join(known.split(".")[:2])
    by_key: dict[str, str] = {}
    for name in dotted:
        by_key.setdefault(name.partition(".")[2], name)
    close = difflib.get_close_matches(key, by_key, n=1, cutoff=0.75)
    return by_key[close[0]] if close else ""


def _closest(name: str, dotted: Iterable[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, dotted, n=1, cutoff=cutoff)), "")


_REFUSED = {
    "adapter.quantization": ("is written model.quantize here (QLoRA)", "set model.quantize={bits: 4}"),
    "adapter.type=qlora": (
        "is written adapter.type=lora with model.quantize here (QLoRA)",
        "set adapter.type=lora and model.quantize={bits: 4}",
    ),
    "adapter.use_dora": (
        "is not supported: peft takes DoRA's magnitudes from the base's weights when it makes the layers, which is "
        "before the base is sharded and loaded here",
        "remove it, or set adapter.use_rslora=true",
    ),
    "adapter.modules_to_save": (
        "is not supported: it trains and saves whole modules beside the adapter", "adapt linear layers only"
    ),
    "adapter.bias": ("is not supported: biases belong to the frozen base", "remove it"),
    **{
        f"optim.name={name}": (
            "is not supported: paged optimizers keep their moments in CUDA's managed memory, which no plan and no "
            "account of memory here knows",
            "set optim.name=adamw_bnb_8bit, or keep the optimizer in host memory: parallel.offload_optimizer=cpu",
        )
        for name in ("paged_adamw", "paged_adamw_8bit", "paged_adamw_32bit")
    },
    **{
        f"parallel.{name}": (
            "is not supported: no model is cut into stages",
            "remove it; parallel.tp, parallel.cp and parallel.ep split layers, sequences and experts",
        )
        for name in ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size")
    },
    "parallel.dp": (
        "is not set here: data ranks are all ranks, over parallel.tp × parallel.cp",
        "remove it, or set parallel.strategy=hsdp with dp_replicate and dp_shard",
    ),
    "adapter.init_lora_weights": ("is not supported: A is drawn as peft draws it by default, B is 0", "remove it"),
}  # fmt: skip
"""Keys, and values of keys, that people know from other tools, and shardkit refuses: (reason, fix)."""


def unknown_key(path: Path, source: str) -> ConfigError:
    """The error for a key that no section has."""
    fields = section_fields()
    if (dotted := ".".join(path[:2])) in KEYS:
        return ConfigError(f"{dotted} was removed{_in(source)}", KEYS[dotted].instead)
    if dotted in _REFUSED:
        reason, fix = _REFUSED[dotted]
        return ConfigError(f"{dotted} {reason}{_in(source)}", fix)
    suggestion = suggest(path)
    kind = "key" if path[0] in fields or "." in suggestion else "section"
    name = ".".join(path[:2]) if kind == "key" else path[0]
    if suggestion:
        fix = f"did you mean {suggestion}?"
    elif kind == "key":
        fix = f"keys of {path[0]}: {', '.join(fields[path[0]])}"
    else:
        fix = f"sections: {', '.join(fields)}"
    return ConfigError(f"unknown {kind} {one_line(name, 80)}{_in(source)}", fix)


@lru_cache(maxsize=1)
def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a config file, with every field's description, for editors."""
    schema = RunConfig.model_json_schema()
    schema["title"] = "shardkit run configuration"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def wrong_value(path: Path, value: Any, source: str, text: str, expected: str = "") -> ConfigError:
    """The error for a value of the wrong type or out of range.

    `text`: pydantic's words for it. `expected`: the values that it names, each in quotes.
    """
    dotted = ".".join(path[:2])
    if (assignment := f"{dotted}={value}") in VALUES:
        return ConfigError(f"{assignment} was removed{_in(source)}", VALUES[assignment])
    if assignment in _REFUSED:
        reason, fix = _REFUSED[assignment]
        return ConfigError(f"{assignment} {reason}{_in(source)}", fix)
    field = section_fields()[path[0]][path[1]]
    fix = f"the default is {dotted}={field.default if isinstance(field.default, str) else shown(field.default, 100)}"
    if field.default is not None and "None" in str(field.annotation):
        fix += "; null is possible too"
    if isinstance(value, (int, float)) and "valid string" in text and len(path) == 2:
        fix = f'quote it: "{shown(value)}"'
    elif "dictionary" in text or any(":" in part for part in path[2:]):
        fix = f"quote it, with a space behind each colon: '{dotted}={{key: value}}'"
    elif len(path) > 2 and "Extra inputs" in text:
        known = [*QuantizeConfig.model_fields, *SourceConfig.model_fields]
        fix = did_you_mean(path[-1], known, lambda name: ".".join([*path[:-1], name])) or f"remove {path[-1]}"
    elif isinstance(value, str) and (choices := re.findall("'([^']*)'", expected)):
        word = _VALUE_SYNONYMS.get(value.lower(), value.lower())
        fix = did_you_mean(word, choices, lambda name: f"{dotted}={name}") or fix
    return ConfigError(f"{dotted}={shown(value)}{_in(source)}: {one_line(text)}", fix)


def did_you_mean(word: str, choices: Iterable[str], name: Callable[[str], str]) -> str:
    """The fix that asks for the nearest choice, as `name` writes it; empty if none is near."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    close = close or [choice for choice in choices if set(word.split("_")) <= set(choice.split("_"))]
    return f"did you mean {' or '.join(map(name, close))}?" if close else ""


def from_validation(error: ValidationError, tree: dict[str, Any], locate: Locate) -> list[ConfigError]:
    """Pydantic's errors, each with the place of its value and a fix; the first one of each key."""
    errors: dict[str, ConfigError] = {}
    by_key: dict[Path, list[Any]] = {}
    for item in error.errors(include_url=False):
        if item["type"] == "conflict":
            cause = item["ctx"]["cause"]
            keys = [(section, key) for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", cause)]
            places = dict.fromkeys(locate(path) for path in keys if path[1] in tree.get(path[0], {}))
            errors.setdefault(cause, ConfigError(cause + _in(", ".join(places)), item["ctx"]["fix"]))
        else:
            by_key.setdefault((str(item["loc"][0]), str(item["loc"][1])), []).append(item)
    for key, items in by_key.items():  # several: each type of a union has its own, or each element of a list
        paths = [tuple(map(str, item["loc"])) for item in items]
        texts = [
            ": ".join([*filter(None, [".".join(path[2:])]), item["msg"]])
            for path, item in zip(paths, items, strict=True)
        ]
        text = "; ".join(text[0].lower() + text[1:] for text in texts)
        choices = str(items[0].get("ctx", {}).get("expected", ""))
        value = tree.get(key[0], {}).get(key[1])
        errors[".".join(key)] = wrong_value(paths[0], value, locate(key), text, choices)
    return list(errors.values())


def combined(errors: list[ConfigError]) -> ConfigError:
    """One error out of several: each cause with its fix on a line of its own."""
    if len(errors) == 1:
        return errors[0]
    lines = [f"  {error.cause}: {error.fix}" for error in errors]
    return ConfigError("\n".join([f"{len(errors)} settings are not valid", *lines]), "correct each of them")


def _in(source: str) -> str:
    return f" ({source})" if source else ""


def shown(value: Any, limit: int = 60) -> str:
    """A value as messages show it: its repr, on one line, shortened."""
    try:
        if value is None or isinstance(value, bool):
            text = "null" if value is None else str(value).lower()
        else:
            text = repr(list(value) if isinstance(value, tuple) else value)
    except (ValueError, RecursionError):  # integers of more than 4300 digits, nesting beyond the stack
        text = f"a huge {type(value).__name__}"
    return one_line(text, limit)
