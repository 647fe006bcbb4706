"""Advice in another tool's keys is read back by that tool's reader as the setting that was advised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.foreign.advice import ToolKeys, climb
from shardkit.foreign.phrases import Tool, phrase
from shardkit.foreign.rewrite import NoKey, change_files, without_techniques
from shardkit.foreign.translate import ForeignJob, read_job
from shardkit.oom.advice import Advice
from shardkit.plan.search.ladder import Rung, table
from shardkit.plan.target import choose_target
from tests.foreign.samples import MODEL, write

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
    assert not [one for one in job.file_keys if one.fate == "unknown"], text
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
    (one,) = ToolKeys("trainer", "ddp", True).words([both])
    assert one.change == (
        "deepspeed: {train_micro_batch_size_per_gpu: auto, gradient_accumulation_steps: auto, gradient_clipping: auto, "
        "zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}"
    )
    fewer = Advice("train.micro_batch_size=2 train.grad_accum_steps=4", 1, "", "")
    assert [ToolKeys(tool, "ddp", True).words([fewer])[0].change for tool in ("deepspeed", "lightning")] == [
        "train_micro_batch_size_per_gpu: 2, gradient_accumulation_steps: 4",
        "batch_size=2 in the DataLoader, Trainer(accumulate_grad_batches=4)",
    ]  # fmt: skip


def test_a_reduce_bucket_that_dwarfs_the_model_is_advice() -> None:
    other = Advice("train.micro_batch_size=2", 10, "", "")
    first, second = ToolKeys("deepspeed", "zero2", True).words([other], (8320, 2_000_000_000))
    assert (first.change, first.saving_bytes) == ("zero_optimization: {reduce_bucket_size: 8320}", 2_000_000_000)
    assert second.change == "train_micro_batch_size_per_gpu: 2"


def test_advice_that_a_tool_cannot_follow_is_left_out() -> None:
    advice = [Advice("optim.in_backward=true", 5, "", ""), Advice("16 ranks", 4, "", "")]
    assert [one.change for one in ToolKeys("trainer", "ddp", True).words(advice)] == ["16 ranks"]


ARGS: dict[str, Any] = {"output_dir": "out", "per_device_train_batch_size": 8, "bf16": True}
STAGE2 = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2},
}  # fmt: skip
FIXED = {**STAGE2, "train_micro_batch_size_per_gpu": 8}
ACCELERATE = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
FSDP = {**ACCELERATE, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
GIVEN = ["train.seq_len=64", "train.micro_batch_size=8"]
AXOLOTL = {"base_model": "m", "micro_batch_size": 8, "sequence_len": 64, "bf16": "auto"}
LLAMA_FACTORY = {"model_name_or_path": "m", "finetuning_type": "full", "do_train": True, "cutoff_len": 64, "bf16": True,
                 "disable_gradient_checkpointing": True}  # fmt: skip


def described(folder: Path, **files: Any) -> ForeignJob:
    (folder / "config.json").write_text(json.dumps(MODEL))
    return read_job(write(folder, **files), str(folder), 8)


@pytest.mark.parametrize(
    ("files", "settings", "text"),
    [
        ({"args__yaml": ARGS}, "activation.policy=full", "gradient_checkpointing: true"),
        ({"args__yaml": ARGS}, "train.micro_batch_size=2 train.grad_accum_steps=4",
         "per_device_train_batch_size: 2, gradient_accumulation_steps: 4"),
        ({"args__yaml": ARGS}, "train.micro_batch_size=1 train.grad_accum_steps=8",
         "per_device_train_batch_size: 1, gradient_accumulation_steps: 8"),
        ({"args__yaml": ARGS}, "parallel.strategy=zero3 parallel.offload_param=cpu",
         "deepspeed: {train_micro_batch_size_per_gpu: auto, gradient_accumulation_steps: auto, gradient_clipping: "
         "auto, zero_optimization: {stage: 3, offload_param: {device: cpu}}}"),
        ({"args__yaml": {**ARGS, "fsdp": True}}, "parallel.strategy=zero2",
         "no fsdp, deepspeed: {train_micro_batch_size_per_gpu: auto, gradient_accumulation_steps: auto, "
         "gradient_clipping: auto, zero_optimization: {stage: 2}}"),
        ({"args__yaml": ARGS}, "activation.policy=full parallel.strategy=fsdp",
         "fsdp: true, fsdp_config: {version: 2}, gradient_checkpointing: true"),
        ({"args__yaml": {**ARGS, "deepspeed": STAGE2}}, "parallel.strategy=zero3",
         "deepspeed: {zero_optimization: {stage: 3}}"),
        ({"args__yaml": ARGS, "ds__json": FIXED}, "train.micro_batch_size=4",
         "args.yaml: per_device_train_batch_size: 4; ds.json: train_micro_batch_size_per_gpu: 4"),
        ({"args__yaml": ARGS, "ds__json": STAGE2}, "parallel.offload_optimizer=cpu",
         "ds.json: zero_optimization: {offload_optimizer: {device: cpu}}"),
        ({"args__yaml": ARGS, "ds__json": STAGE2}, "parallel.strategy=fsdp",
         "args.yaml: fsdp: true, fsdp_config: {version: 2}; no ds.json"),
        ({"accelerate__yaml": FSDP}, "parallel.strategy=zero3",
         "distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}"),
        ({"accelerate__yaml": ACCELERATE, "args__yaml": ARGS}, "parallel.strategy=fsdp",
         "accelerate.yaml: distributed_type: FSDP, fsdp_config: {fsdp_version: 2}"),
        ({"recipe__yaml": AXOLOTL}, "train.micro_batch_size=2 train.grad_accum_steps=4",
         "micro_batch_size: 2, gradient_accumulation_steps: 4"),
        ({"recipe__yaml": AXOLOTL}, "activation.policy=full parallel.strategy=fsdp",
         "fsdp_version: 2, fsdp_config: {reshard_after_forward: true}, gradient_checkpointing: true"),
        ({"recipe__yaml": AXOLOTL}, "parallel.strategy=zero2",
         "deepspeed: {train_micro_batch_size_per_gpu: auto, gradient_accumulation_steps: auto, gradient_clipping: "
         "auto, zero_optimization: {stage: 2}}"),
        ({"recipe__yaml": LLAMA_FACTORY}, "activation.policy=full", "disable_gradient_checkpointing: false"),
    ],
)  # fmt: skip
def test_settings_are_told_as_a_change_of_the_files_that_decide_them(
    files: dict[str, Any], settings: str, text: str, tmp_path: Path
) -> None:
    job = described(tmp_path, **files)
    overrides = GIVEN[:1] if "train.micro_batch_size" in job.settings else GIVEN
    changed = change_files(job, overrides, settings.split())
    assert changed.text == text
    config = changed.load().config
    for key, _, value in (one.partition("=") for one in settings.split()):
        section, name = key.split(".")
        assert str(getattr(getattr(config, section), name)) == value
    assert config.train.max_norm == job.load(overrides).config.train.max_norm or "accelerate__yaml" in files


def test_what_no_file_says_is_told_about_the_script(tmp_path: Path) -> None:
    job = described(tmp_path, accelerate__yaml=ACCELERATE)
    changed = change_files(job, GIVEN, ["train.micro_batch_size=2", "activation.policy=full"])
    assert changed.text == "batch_size=2 in the DataLoader; model.gradient_checkpointing_enable()"
    config = changed.load().config
    assert (config.train.micro_batch_size, config.activation.policy) == (2, "full")


def test_a_setting_without_a_key_is_refused_by_name(tmp_path: Path) -> None:
    job = described(tmp_path, args__yaml=ARGS)
    for setting in ("model.loss_chunk_size=1024", "activation.policy=selective", "optim.in_backward=true"):
        with pytest.raises(NoKey, match=f"no key of args.yaml means {setting}"):
            change_files(job, GIVEN[:1], [setting])
    with pytest.raises(NoKey):
        change_files(described(tmp_path, accelerate__yaml=ACCELERATE), GIVEN, ["optim.name=adamw8bit"])


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"args__yaml": {**ARGS, "gradient_checkpointing": True}}, "bf16: false, gradient_checkpointing: false"),
        ({"args__yaml": {**ARGS, "deepspeed": STAGE2}}, "bf16: false, no deepspeed"),
        ({"accelerate__yaml": FSDP}, "distributed_type: MULTI_GPU, mixed_precision: 'no'"),
        ({"accelerate__yaml": ACCELERATE, "args__yaml": ARGS, "ds__json": FIXED},
         "accelerate.yaml: mixed_precision: 'no'; args.yaml: bf16: false; no ds.json"),
        ({"ds__json": {**FIXED, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}},
         "bf16: {enabled: false}, zero_optimization: {stage: 0}"),
    ],
)  # fmt: skip
def test_a_plain_job_has_no_engine_no_half_precision_and_no_checkpointing(
    files: dict[str, Any], text: str, tmp_path: Path
) -> None:
    job = described(tmp_path, **files)
    changed = without_techniques(job, GIVEN[:1] if "train.micro_batch_size" in job.settings else GIVEN)
    config = changed.load().config
    assert (config.parallel.strategy, config.precision.mode, config.activation.policy) == ("ddp", "fp32", "none")
    assert config.train.micro_batch_size == 8
    assert changed.text == text


@pytest.mark.release
def test_a_ladder_of_files_goes_on_without_rungs_that_they_cannot_say(tmp_path: Path) -> None:
    ds = {**FIXED, "bf16": {"enabled": True}, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    job = described(tmp_path, ds__json=ds)
    rungs = [
        Rung("+ bf16", ("precision.mode=bf16",)),
        Rung("+ chunked", ("model.loss_chunk_size=8",)),
        Rung("+ ZeRO-2", ("parallel.strategy=zero2",)),
    ]
    given = [*GIVEN[:1], "train.eval_samples=0"]
    steps = list(climb(job, given, rungs, choose_target(job.load(given).config, 8, gpu="l4", expandable=False)))
    names = [step.rung.name for step in steps]
    assert names == ["the files as they are", "plain ddp", "+ bf16", "+ chunked", "+ ZeRO-2"]
    own, bare, bf16, chunked, zero2 = steps
    assert own.predicted and bare.predicted and zero2.predicted
    assert bf16.predicted is None and "stage is 0" in bf16.refused
    assert chunked.predicted is None and "no key of ds.json" in chunked.refused
    assert zero2.in_the_files == "bf16: {enabled: true}, zero_optimization: {stage: 2}"
    head, _, first, *_ = table(steps).splitlines()
    assert head == "| rung | predicted | | in the files |" and first.endswith("| fits | – |")
