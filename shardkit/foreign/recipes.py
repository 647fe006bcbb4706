"""What the loops of TRL, LLaMA-Factory and axolotl do beside the Trainer's: defaults, ignored keys, types, adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import File
from .tables import AUTO, NoCounterpart, Settings, truth
from .together import Together
from .tools import RECIPES, TRAINER_DEFAULTS

_LINEAR = "lora_target_linear takes every linear layer"
_BASE_MODEL = {"axolotl": "base_model", "llamafactory": "model_name_or_path", "trl": "model_name_or_path"}
_R = {"axolotl": "lora_r", "llamafactory": "lora_rank", "trl": "lora_r"}
_TARGETS = {
    "axolotl": "lora_target_linear: true", "llamafactory": "lora_target: all", "trl": "lora_target_modules: all-linear"
}  # fmt: skip


def _is_on(value: Any) -> bool:
    """Whether a switch is on; text that is no switch counts as off."""
    try:
        return truth(value)
    except NoCounterpart:
        return False


def defaults(job: Together) -> Settings:
    """Values of the keys that a Trainer's file or a recipe leaves out, in its own spelling."""
    file = job.file("trainer")
    if file is None:
        return {}
    values = dict(TRAINER_DEFAULTS[file.tool])
    if file.tool == "trl" and not _is_on(file.values.get("fp16")):
        values["bf16"] = True
    if file.tool == "axolotl" and file.section("fsdp_config") and file.values.get("fsdp") is None:
        values["fsdp"] = True
    if file.tool == "llamafactory" and isinstance(file.values.get("lora_rank", 8), int):
        values["lora_alpha"] = 2 * file.values.get("lora_rank", 8)
    if job.has("peft"):
        values = {key: value for key, value in values.items() if not key.startswith(("lora_", "finetuning_type"))}
    return values


def ignored_in_a_recipe(job: Together, key: str) -> str:
    """Why a recipe's tool does not read a key beside the recipe's other keys; empty if it does."""
    file = job.file("trainer")
    if file is None or file.tool != "axolotl":
        return ""
    values = file.values
    if key == "bf16" and values.get("bf16", AUTO) == AUTO and _is_on(values.get("fp16")):
        return "fp16 is on"
    if key == "lora_target_modules" and _is_on(values.get("lora_target_linear")):
        return _LINEAR
    return ""


def refuse_unnamed_layers(job: Together, key: str) -> None:
    """Record that no file names the layers that have adapters."""
    job.problem(
        "unsaid", f"no file says which layers have adapters: without {key} peft goes by the model's type",
        f'write them into the adapter file, such as "{key}": ["q_proj", "v_proj"], or set adapter.targets on the '
        "command line", "adapter.targets", (key,),
    )  # fmt: skip


def check_recipe(job: Together) -> None:
    """Record a recipe that trains nothing or that its tool refuses, and an adapter without a rank or layers."""
    file = job.file("trainer")
    if file is None or file.tool not in RECIPES:
        return
    if file.tool == "llamafactory" and not _is_on(file.values.get("do_train")):
        job.problem(
            "contradiction", f"{file.name}: do_train is not true, so LLaMA-Factory trains nothing with it",
            "set do_train: true, or name a recipe that trains", "", ("do_train",),
        )  # fmt: skip
    if file.tool == "axolotl" and file.values.get("adapter") == "qlora" and not _is_on(file.values.get("load_in_4bit")):
        job.problem(
            "contradiction", f"{file.name}: adapter=qlora without load_in_4bit=true, which axolotl refuses",
            "set load_in_4bit: true, or adapter: lora", "", ("adapter", "load_in_4bit"),
        )  # fmt: skip
    if not job.adapted or job.has("peft"):
        return
    keys = {*job.settings, *(problem.setting for problem in job.problems)}
    if "adapter.r" not in keys:
        name = _R[file.tool]
        job.problem(
            "unsaid", f"{file.name}: the adapter has no {name}, and {file.tool} has no default",
            f"write {name}: 16, or set adapter.r=16 on the command line", "adapter.r", (name,),
        )  # fmt: skip
    if "adapter.targets" not in keys:
        job.problem(
            "unsaid", f"{file.name} does not say which layers have adapters: peft then goes by the model's type",
            f"write {_TARGETS[file.tool]}, or set adapter.targets=all-linear on the command line", "adapter.targets",
        )  # fmt: skip


def lora_kernels(job: Together) -> list[str]:
    """A line about kernels that axolotl turns on by itself beside an adapter; empty if it does not."""
    file = job.file("trainer")
    if file is None or file.tool != "axolotl" or not job.adapted:
        return []
    switches = [f"lora_{name}_kernel" for name in ("mlp", "qkv", "o", "embedding")]
    is_set = any(file.values.get(key) is not None for key in (*switches, "rl"))
    if is_set or _is_on(file.values.get("trust_remote_code")):
        return []
    return ["axolotl's LoRA kernels, which it turns on unless a lora_*_kernel key is set: planned are peft's layers"]


def model_named(files: Sequence[File]) -> tuple[str, str]:
    """The folder of the model that a recipe names, and the recipe's `file: key=name`; each empty if there is none."""
    for file in files:
        name = file.values.get(_BASE_MODEL.get(file.tool, ""))
        if not isinstance(name, str) or not name:
            continue
        for folder in (Path(name).expanduser(), file.folder / name):
            if (folder / "config.json").is_file():
                return str(folder), ""
        return "", f"{file.name}: {_BASE_MODEL[file.tool]}={name}"
    return "", ""


def loaded_type(job: Together, halves: Sequence[str], stored: str) -> str:
    """The type in which a recipe's loop holds the weights that it does not shard.

    axolotl loads them in the half-precision type that is on. LLaMA-Factory does too, and then makes the trainable ones
    fp32 unless `pure_bf16` is on. TRL loads fp32 unless `dtype` says another type.

    Args:
        halves: `fp16` and `bf16`, as far as they are on.
        stored: the type of the model's files, `bfloat16` or similar; empty if unknown.
    """
    file = job.file("trainer")
    names = {"bf16": "bfloat16", "fp16": "float16"}
    half = next((names[half] for half in halves), "")
    if file is None or file.tool not in RECIPES:
        return stored
    if file.tool == "axolotl":
        full = [name for name in ("bfloat16", "float16") if _is_on(file.values.get(name))]
        return half or (full[0] if full else "float32")
    if file.tool == "llamafactory":
        if _is_on(file.values.get("pure_bf16")):
            return "bfloat16"
        return (half or stored) if job.adapted else "float32"
    name = str(file.values.get("dtype") or file.values.get("torch_dtype") or "float32").removeprefix("torch.")
    return stored if name == AUTO else name
