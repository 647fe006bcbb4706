"""Fill in DeepSpeed's and Accelerate's `auto` from the job's other files, the command line and the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .tables import AUTO, Problem, Settings
from .together import PSEUDO, FileKey, Together
from .tools import find

_SIZES = {"reduce_bucket_size": 1.0, "stage3_prefetch_bucket_size": 0.9}
_FROM_A_SCRIPT = ("train_micro_batch_size_per_gpu",)
_NEUTRAL = ("optimizer.params.", "scheduler.")
"""Sections whose values change no memory."""


def width(model: dict[str, Any]) -> int | None:
    """The hidden size that transformers finds in a model's config; `None` if there is none."""
    for config in (model, model.get("text_config")):
        if not isinstance(config, dict):
            continue
        sizes = config.get("hidden_sizes")
        names = ("hidden_size", "n_embd", "d_model", "dim", "n_embed")
        value = max(sizes) if sizes else next((config[name] for name in names if config.get(name)), None)
        if isinstance(value, int):
            return value
    return None


def fill(job: Together) -> None:
    """Settle each `auto`; one that changes memory and that nothing fills becomes a problem."""
    for index, file_key in enumerate(job.file_keys):
        if file_key.fate != AUTO:
            continue
        entry = find(file_key.tool, file_key.key)
        setting = entry.only if entry else ""
        filled = _filled(job, file_key, setting)
        if filled is None:
            kind = "unsaid" if file_key.key in _FROM_A_SCRIPT and job.has("accelerate") else "auto"
            cause = f'{file_key.file}: {file_key.key}="auto", but no other file says what it becomes'
            key = "precision.mode" if setting in PSEUDO else setting
            job.problems.append(Problem(kind, cause, _fix(job, file_key, key), key, (file_key.key,)))
            continue
        settings, source = filled
        job.file_keys[index] = replace(file_key, settings=settings, note=source)
        job.settings |= settings


def _filled(job: Together, file_key: FileKey, setting: str) -> tuple[Settings, str] | None:
    """The value of an `auto` and its source; `None` if nothing has it."""
    trainer, accelerate = job.has("trainer"), job.has("accelerate")
    if file_key.key == "optimizer.params.betas" and trainer:
        return {}, "from the Trainer: adam_beta1, adam_beta2"
    key = "precision.mode" if setting in PSEUDO else setting
    if key and key in job.command_line:
        return {}, f"from the command line: {key}"
    candidates = (entry for entry in job.file_keys if (entry.file, entry.key) != (file_key.file, file_key.key))
    source_key = next((entry for entry in candidates if setting in entry.settings), None)
    if source_key is not None:
        return {setting: source_key.settings[setting]}, f"from {source_key.file}: {source_key.key}"
    if trainer and file_key.key.startswith("scheduler.params."):
        return {}, "the Trainer computes it"
    if file_key.key.startswith(_NEUTRAL):
        source = "Accelerate takes it from DummyOptim and DummyScheduler in the script" if accelerate else ""
        return {}, source or "it changes no memory"
    if file_key.key == "train_batch_size":
        return {}, "the product of micro-batch, accumulation and ranks"
    if file_key.key.endswith("gradient_clipping"):
        return {setting: 1.0}, "Accelerate's default" if accelerate else "the Trainer's default"
    name = file_key.key.removeprefix("zero_optimization.")
    hidden = width(job.model)
    if name in _SIZES and hidden:
        return {setting: int(_SIZES[name] * hidden * hidden)}, f"from the model's hidden size {hidden}"
    if name == "stage3_param_persistence_threshold" and hidden:
        return {setting: 10 * hidden}, f"from the model's hidden size {hidden}"
    if not (trainer or accelerate):
        return None
    if file_key.key in ("fp16.enabled", "bf16.enabled"):
        return {setting: False}, "no file turns it on"
    if file_key.key.endswith("gradient_accumulation_steps"):
        return {setting: 1}, "the default of Accelerator(), whose argument in the script wins"
    return None


def _fix(job: Together, file_key: FileKey, key: str) -> str:
    """The fix of one key: what to add to the command, or to write in its place."""
    if file_key.key in _FROM_A_SCRIPT and job.has("accelerate"):
        return f"the DataLoader in the script decides it: add it to the command, such as {key}=4"
    if file_key.key.startswith("zero_optimization."):
        if job.model:
            return "write a number: the model's config has no hidden_size, from which the Trainer computes it"
        return "pass --model, whose hidden_size decides it, or write a number"
    value = {"train.micro_batch_size": "4", "train.grad_accum_steps": "1", "precision.mode": "bf16"}.get(key, "")
    if file_key.key.endswith(".enabled"):
        return f"add {key}={value} to the command, or write true or false"
    if job.has("accelerate"):
        return f"write a number, or add {key}={value} to the command: only the Trainer fills it in, not Accelerate"
    if value:
        return f"add {key}={value} to the command, write a number, or pass the Trainer's file too"
    return "write its value, or pass the Trainer's or Accelerate's file too"


def in_few_lines(problems: Sequence[Problem]) -> Iterator[tuple[str, str]]:
    """Causes and fixes; every `auto` with the same fix is one of them."""
    autos: dict[str, list[Problem]] = {}
    for problem in problems:
        if problem.kind == "auto":
            autos.setdefault(problem.fix, []).append(problem)
        else:
            yield problem.cause, problem.fix
    for fix, same in autos.items():
        if len(same) == 1:
            yield same[0].cause, fix
        else:
            keys = ", ".join(key for problem in same for key in problem.keys)
            name = same[0].cause.partition(": ")[0]
            yield f'{name}: {len(same)} keys are "auto", but no other file says what they become ({keys})', fix
