"""Advice in another tool's keys is read back by that tool's reader as the setting that was advised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.config.foreign.translate import read_job
from shardkit.oom.advice import Advice
from shardkit.run.their_keys import TheirKeys, Tool, phrase

ENGINES = {
    ("trainer", "zero2"): {"deepspeed": {"zero_optimization": {"stage": 2}}},
    ("trainer", "zero3"): {"deepspeed": {"zero_optimization": {"stage": 3}}},
    ("trainer", "fsdp"): {"fsdp": True, "fsdp_config": {"version": 2}},
    ("accelerate", "zero3"): {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
    ("accelerate", "fsdp"): {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
    ("deepspeed", "zero3"): {"zero_optimization": {"stage": 3}},
}
BASE: dict[str, dict[str, Any]] = {
    "trainer": {"output_dir": "out", "per_device_train_batch_size": 8},
    "accelerate": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 8},
    "deepspeed": {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}},
}


def merged(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(tree[key], other[key]) for key in tree.keys() & other.keys() if isinstance(other[key], dict)}
    return {**tree, **other, **both}


def read_back(tool: str, text: str, engine: str, folder: Path) -> dict[str, Any]:
    file = folder / "theirs.yaml"
    tree = merged(merged(BASE[tool], ENGINES.get((tool, engine), {})), yaml.safe_load("{" + text + "}"))
    file.write_text(yaml.safe_dump(tree))
    job = read_job([str(file)], gpus=8)
    assert not [one for one in job.said if one.fate == "unknown"], text
    return dict(job.settings)


@pytest.mark.parametrize(
    ("tool", "setting", "engine"),
    [
        ("trainer", "train.micro_batch_size=2", "ddp"),
        ("trainer", "train.grad_accum_steps=4", "ddp"),
        ("trainer", "activation.policy=full", "ddp"),
        ("trainer", "precision.mode=bf16", "ddp"),
        ("trainer", "optim.name=adamw8bit", "ddp"),
        ("trainer", "parallel.strategy=zero3", "ddp"),
        ("trainer", "parallel.strategy=fsdp", "ddp"),
        ("trainer", "parallel.offload_optimizer=cpu", "zero2"),
        ("trainer", "parallel.offload_param=cpu", "zero3"),
        ("trainer", "parallel.offload_param=cpu", "fsdp"),
        ("trainer", "parallel.reshard_after_forward=true", "fsdp"),
        ("trainer", "data.workers=2", "ddp"),
        ("accelerate", "activation.policy=full", "fsdp"),
        ("accelerate", "precision.mode=bf16", "ddp"),
        ("accelerate", "parallel.strategy=zero2", "ddp"),
        ("accelerate", "parallel.strategy=fsdp", "ddp"),
        ("accelerate", "parallel.offload_optimizer=cpu", "zero3"),
        ("accelerate", "parallel.offload_param=cpu", "zero3"),
        ("accelerate", "parallel.offload_param=cpu", "fsdp"),
        ("accelerate", "parallel.reshard_after_forward=true", "fsdp"),
        ("deepspeed", "train.micro_batch_size=2", "zero1"),
        ("deepspeed", "train.grad_accum_steps=4", "zero1"),
        ("deepspeed", "precision.mode=bf16", "zero1"),
        ("deepspeed", "parallel.strategy=zero3", "zero1"),
        ("deepspeed", "parallel.offload_optimizer=cpu", "zero1"),
        ("deepspeed", "parallel.offload_param=cpu", "zero3"),
    ],
)
def test_a_phrase_means_the_setting(tool: Tool, setting: str, engine: str, tmp_path: Path) -> None:
    text = phrase(tool, setting, engine)
    assert text is not None
    key, _, value = setting.partition("=")
    found = read_back(tool, text, engine, tmp_path)
    if key == "precision.mode":
        found = read_job([str(tmp_path / "theirs.yaml")], gpus=8).settings  # decided last
    assert str(found[key]).lower() == value, text


def test_changes_of_several_keys_are_one_mapping() -> None:
    both = Advice("parallel.strategy=zero2 parallel.offload_optimizer=cpu", 1, "", "")
    (one,) = TheirKeys("trainer", "ddp", True).words([both])
    assert one.change == "deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}"
    fewer = Advice("train.micro_batch_size=2 train.grad_accum_steps=4", 1, "", "")
    assert [TheirKeys(tool, "ddp", True).words([fewer])[0].change for tool in ("deepspeed", "lightning")] == [
        "train_micro_batch_size_per_gpu: 2, gradient_accumulation_steps: 4",
        "batch_size=2 in the DataLoader, Trainer(accumulate_grad_batches=4)",
    ]  # fmt: skip


def test_a_reduce_bucket_that_dwarfs_the_model_is_advice() -> None:
    other = Advice("train.micro_batch_size=2", 10, "", "")
    first, second = TheirKeys("deepspeed", "zero2", True).words([other], (8320, 2_000_000_000))
    assert (first.change, first.saving_bytes) == ("zero_optimization: {reduce_bucket_size: 8320}", 2_000_000_000)
    assert second.change == "train_micro_batch_size_per_gpu: 2"


def test_advice_that_a_tool_cannot_follow_is_left_out() -> None:
    advice = [Advice("optim.in_backward=true", 5, "", ""), Advice("16 ranks", 4, "", "")]
    assert [one.change for one in TheirKeys("trainer", "ddp", True).words(advice)] == ["16 ranks"]
