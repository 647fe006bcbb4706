"""Advice in the keys of the tool that runs the loop, and planned where that tool's files say what the job is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from ..config.foreign.translate import Job
from ..errors import gib
from ..oom.advice import Advice
from ..plan.advise import changes_that_fit
from ..plan.client import Planner
from ..plan.target import Target

Tool = Literal["trainer", "accelerate", "deepspeed", "lightning", "torch"]
LIMIT_S = 90.0
"""Most seconds for the plans of one post-mortem."""
_ZERO = ("zero1", "zero2", "zero3")
_RECOMPUTE = "model.gradient_checkpointing_enable()"
_LOADER = "batch_size={} in the DataLoader"
Phrase = str | Callable[[Any, str], str | None] | None
"""A text with a place for the value, or (value, strategy) → text; `None` if the tool has no such setting."""


def _trainer_engine(value: str, strategy: str) -> str | None:
    if value in _ZERO:
        return f"deepspeed: {{zero_optimization: {{stage: {value[-1]}}}}}"
    return "fsdp: true, fsdp_config: {version: 2}" if value == "fsdp" else None


def _accelerate_engine(value: str, strategy: str) -> str | None:
    if value in _ZERO:
        return f"distributed_type: DEEPSPEED, deepspeed_config: {{zero_stage: {value[-1]}}}"
    return "distributed_type: FSDP, fsdp_config: {fsdp_version: 2}" if value == "fsdp" else None


def _lightning_engine(value: str, strategy: str) -> str | None:
    names = {**{zero: f"deepspeed_stage_{zero[-1]}" for zero in _ZERO}, "fsdp": "fsdp"}
    return f'Trainer(strategy="{names[value]}")' if value in names else None


def _of_engine(under_zero: str | None, under_fsdp: str | None) -> Callable[[Any, str], str | None]:
    return lambda value, strategy: under_zero if strategy in _ZERO else under_fsdp


_PHRASES: dict[Tool, dict[str, Phrase]] = {
    "trainer": {
        "train.micro_batch_size": "per_device_train_batch_size: {}",
        "train.grad_accum_steps": "gradient_accumulation_steps: {}",
        "activation.policy=full": "gradient_checkpointing: true",
        "precision.mode=bf16": "bf16: true",
        "optim.name=adamw8bit": "optim: adamw_torch_8bit",
        "parallel.strategy": _trainer_engine,
        "parallel.offload_optimizer=cpu": "deepspeed: {zero_optimization: {offload_optimizer: {device: cpu}}}",
        "parallel.offload_param=cpu": _of_engine(
            "deepspeed: {zero_optimization: {offload_param: {device: cpu}}}", "fsdp_config: {cpu_offload: true}"
        ),
        "parallel.reshard_after_forward=true": "fsdp_config: {reshard_after_forward: true}",
        "data.workers": "dataloader_num_workers: {}",
    },
    "accelerate": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "Accelerator(gradient_accumulation_steps={})",
        "activation.policy=full": lambda value, strategy: (
            "fsdp_config: {fsdp_activation_checkpointing: true}" if strategy == "fsdp" else _RECOMPUTE
        ),
        "precision.mode=bf16": "mixed_precision: bf16",
        "parallel.strategy": _accelerate_engine,
        "parallel.offload_optimizer=cpu": "deepspeed_config: {offload_optimizer_device: cpu}",
        "parallel.offload_param=cpu": _of_engine(
            "deepspeed_config: {offload_param_device: cpu}", "fsdp_config: {fsdp_offload_params: true}"
        ),
        "parallel.reshard_after_forward=true": "fsdp_config: {fsdp_reshard_after_forward: true}",
        "data.workers": "num_workers={} in the DataLoader",
    },
    "deepspeed": {
        "train.micro_batch_size": "train_micro_batch_size_per_gpu: {}",
        "train.grad_accum_steps": "gradient_accumulation_steps: {}",
        "activation.policy=full": _RECOMPUTE,
        "precision.mode=bf16": "bf16: {enabled: true}",
        "parallel.strategy": lambda value, strategy: (
            f"zero_optimization: {{stage: {value[-1]}}}" if value in _ZERO else None
        ),
        "parallel.offload_optimizer=cpu": "zero_optimization: {offload_optimizer: {device: cpu}}",
        "parallel.offload_param=cpu": "zero_optimization: {offload_param: {device: cpu}}",
        "data.workers": "num_workers={} in the DataLoader",
    },
    "lightning": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "Trainer(accumulate_grad_batches={})",
        "activation.policy=full": _RECOMPUTE,
        "precision.mode=bf16": 'Trainer(precision="bf16-mixed")',
        "parallel.strategy": _lightning_engine,
        "parallel.offload_optimizer=cpu": "DeepSpeedStrategy(offload_optimizer=True)",
        "parallel.offload_param=cpu": _of_engine(
            "DeepSpeedStrategy(offload_parameters=True)", "FSDPStrategy(cpu_offload=True)"
        ),
        "data.workers": "num_workers={} in the DataLoader",
    },
    "torch": {
        "train.micro_batch_size": _LOADER,
        "train.grad_accum_steps": "{} micro-batches for each optimizer step",
        "activation.policy=full": _RECOMPUTE,
        "precision.mode=bf16": "torch.autocast with torch.bfloat16 around forward and loss",
        "optim.name=adamw8bit": "torchao.optim.AdamW8bit",
        "parallel.strategy": lambda value, strategy: "fully_shard(model)" if value == "fsdp" else None,
        "parallel.offload_param=cpu": _of_engine(None, "fully_shard(…, offload_policy=CPUOffloadPolicy())"),
        "parallel.reshard_after_forward=true": "fully_shard(…, reshard_after_forward=True)",
        "data.workers": "num_workers={} in the DataLoader",
    },
}
_BUCKETS: dict[Tool, str] = {
    "trainer": "deepspeed: {zero_optimization: {reduce_bucket_size: {}}}",
    "accelerate": "zero_optimization: {reduce_bucket_size: {}} in the deepspeed_config_file",
    "deepspeed": "zero_optimization: {reduce_bucket_size: {}}",
    "lightning": "DeepSpeedStrategy(reduce_bucket_size={})",
    "torch": "zero_optimization: {reduce_bucket_size: {}}",
}
_WITHOUT_METHOD = "torch.utils.checkpoint around each block"


def phrase(tool: Tool, setting: str, strategy: str, has_checkpointing: bool = True) -> str | None:
    """One setting of shardkit, `train.micro_batch_size=2`, in a tool's words; `None` if the tool has none.

    Args:
        strategy: the engine that the setting is for.
        has_checkpointing: whether the model has transformers' `gradient_checkpointing_enable`.
    """
    key, _, value = setting.partition("=")
    known = _PHRASES[tool]
    found = known.get(setting, known.get(key))
    text = found(value, strategy) if callable(found) else found and found.replace("{}", value)
    return _WITHOUT_METHOD if text == _RECOMPUTE and not has_checkpointing else text


@dataclass
class TheirKeys:
    """Says advice in a tool's keys, and plans it.

    Args:
        strategy: the engine that runs, in shardkit's word.
        has_checkpointing: as for `phrase`.
    """

    tool: Tool
    strategy: str
    has_checkpointing: bool

    def words(self, advice: list[Advice], buckets: tuple[int, int] | None = None) -> list[Advice]:
        """The advice that the tool can follow, in its keys, the largest saving first.

        Args:
            buckets: (elements that are enough for a reduce bucket of DeepSpeed, bytes saved).
        """
        found = [replace(one, change=text) for one in advice if (text := self._said(one.change)) is not None]
        if buckets is not None:
            text = _BUCKETS[self.tool].replace("{}", str(buckets[0]))
            why = "DeepSpeed makes the whole bucket, though the model's gradients need less"
            found.append(Advice(text, buckets[1], "none to speak of", why))
        return sorted(found, key=lambda one: -(one.saving_bytes or 0))

    def planned(self, advice: list[Advice], job: Job, target: Target, overrides: Sequence[str]) -> list[Advice]:
        """Planned changes, those that fit first and pairs if no single one does, then the rest of `advice`.

        Args:
            job: the job as their files describe it.
            overrides: settings that no file has.

        Raises:
            ShardkitError: the job cannot be planned.
        """
        with Planner(target, loop=job.loop) as planner:
            timer = threading.Timer(LIMIT_S, planner.stop)
            timer.daemon = True
            timer.start()
            try:
                estimate = planner.predict(job.load(overrides).config)
                changes = changes_that_fit(lambda more: job.load([*overrides, *more]).config, estimate, planner)
            finally:
                timer.cancel()
        found = []
        for change in changes:
            text, verdict = self._said(change.settings), change.estimate.verdict
            if text is not None and verdict is not None and target.device_memory is not None:
                planned = f"planned: {gib(change.estimate.needed)} of {gib(target.device_memory)}, {verdict}"
                why = f"{gib(estimate.needed)} are planned without it"
                found.append(Advice(text, change.saving, change.cost, why, planned, verdict))
        known = {one.change for one in found}
        room = sum(one.verdict != "does not fit" for one in found)
        return found[:room] + [one for one in advice if one.change not in known] + found[room:]

    def _said(self, change: str) -> str | None:
        if "=" not in change or change.startswith("PYTORCH_"):
            return change
        settings = change.split(" ")
        engine = next((s.partition("=")[2] for s in settings if s.startswith("parallel.strategy=")), self.strategy)
        texts = [phrase(self.tool, one, engine, self.has_checkpointing) for one in settings]
        return None if None in texts else _joined([text for text in texts if text])


def _joined(texts: list[str]) -> str:
    """Texts as one; parts of one YAML mapping are merged: two of `deepspeed:` would not be read."""
    trees = [_mapping(text) for text in texts]
    if len(texts) < 2 or None in trees:
        return ", ".join(texts)
    merged: dict[str, Any] = {}
    for tree in trees:
        _merge(merged, tree or {})
    return yaml.safe_dump(merged, default_flow_style=True, sort_keys=False, width=10_000).strip()[1:-1]


def _mapping(text: str) -> dict[str, Any] | None:
    try:
        found = yaml.safe_load("{" + text + "}")
    except yaml.YAMLError:
        return None
    return found if isinstance(found, dict) and None not in found.values() else None


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value
