"""Accelerate itself reads its files; these tests pass with the oldest and with the newest release."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardkit.config.libraries import installed
from shardkit.errors import ConfigError
from shardkit.foreign import translate
from shardkit.foreign.translate import ForeignJob, accelerate_release, find, read_job

from .samples import fates, write

CLUSTER = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
OPEN = ["train.micro_batch_size=2", "train.seq_len=64"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(tmp_path, config__json={"model_type": "llama", "architectures": ["LlamaForCausalLM"]})[0]


def read(folder: Path, content: Any, model: str | None = None) -> ForeignJob:
    return read_job(write(folder, accelerate__yaml=content), model)


def test_every_key_of_the_installed_release_has_a_meaning() -> None:
    release = accelerate_release()
    assert release.version == installed("accelerate")
    sections = {name for name in release.names if name.endswith("_config")}
    assert {"fsdp_config", "deepspeed_config"} <= sections
    assert sorted(name for name in release.names - sections if not find("Accelerate", name)[0]) == []
    of_sections = [
        f"{section}.{name}"
        for section, prefix in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_"))
        for name in release.options
        if name.startswith(prefix)
    ]
    assert len(of_sections) > 15
    # Attributes of the plugin that no file sets, such as `fsdp_mixed_precision_policy`, are objects.
    missing = [key for key in of_sections if not find("Accelerate", key)[0] and release.options[key.split(".")[1]]]
    assert missing == []


def test_a_file_without_values_has_accelerates_defaults(model: str, tmp_path: Path) -> None:
    bare = {**CLUSTER, "distributed_type": "DEEPSPEED"}
    assert read(tmp_path, bare, model).load([*OPEN, "train.grad_accum_steps=1"]).config.parallel.strategy == "zero2"
    job = read(tmp_path, {**CLUSTER, "distributed_type": "FSDP"}, model)
    assert job.load(OPEN).config.parallel.strategy == "fsdp"


def test_a_key_of_a_later_release_is_not_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    release = accelerate_release()
    newer = release._replace(options={**release.options, "fsdp_new_in_99": None})
    monkeypatch.setattr(translate, "accelerate_release", lambda: newer)
    content = {**CLUSTER, "distributed_type": "FSDP", "fsdp_config": {"fsdp_new_in_99": True, "fsdp_new_in_100": 1}}
    job = read(tmp_path, content)
    assert len(job.not_planned) == 1 and "fsdp_new_in_99=true" in job.not_planned[0]
    assert fates(job)["fsdp_config.fsdp_new_in_100"] == "unknown"


def test_keys_of_before_are_read_as_accelerate_converts_them(model: str, tmp_path: Path) -> None:
    config = read(tmp_path, {**CLUSTER, "fp16": True, "dynamo_backend": "INDUCTOR"}, model).load(OPEN).config
    assert (config.precision.mode, config.compile.enabled) == ("fp16", True)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ({"compute_environment": "LOCAL_MACHINE", "num_processes": 2}, "`distributed_type` must be specified"),
        ({**CLUSTER, "distributed_type": "MULTI_GPUS"}, "'MULTI_GPUS' is not a valid DistributedType"),
        ({**CLUSTER, "compute_environment": "MY_MACHINE"}, "'MY_MACHINE' is not a valid ComputeEnvironment"),
        ({**CLUSTER, "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"}, "Amazon SageMaker"),
    ],
)
def test_what_accelerate_refuses_is_refused_in_its_words(content: dict[str, Any], cause: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(cause)) as refused:
        read(tmp_path, content)
    assert "\n" not in refused.value.cause and refused.value.fix


@pytest.mark.parametrize("odd", [None, {}, {"a": 1}, [], [{}], True, -1, 1.5, "", "x"])
def test_odd_values_are_refused_or_read(odd: Any, tmp_path: Path) -> None:
    for key in (*sorted(accelerate_release().names), "fp16", "dynamo_backend"):
        for kind in ("FSDP", "DEEPSPEED"):
            with suppress(ConfigError):
                assert read(tmp_path, {**CLUSTER, "distributed_type": kind, key: odd}).file_keys
