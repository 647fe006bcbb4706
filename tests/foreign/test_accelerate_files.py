"""Accelerate itself reads its files; these tests pass with the oldest and with the newest release."""

from __future__ import annotations

import dataclasses
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardkit.config.libraries import TESTED, installed
from shardkit.errors import ConfigError
from shardkit.foreign import accelerate_files, combine, together
from shardkit.foreign.accelerate_files import Accelerate, accelerate_release, defaults
from shardkit.foreign.tools import find
from shardkit.foreign.translate import read_job

from .samples import DDP, FSDP1, FSDP2, ZERO2, fates, write

CLUSTER = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
OPEN = ["train.micro_batch_size=2", "train.seq_len=64"]
OF_THE_NEWEST = pytest.mark.skipif(
    installed("accelerate") != TESTED["accelerate"][1], reason=f"needs Accelerate {TESTED['accelerate'][1]}"
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(tmp_path, config__json={"model_type": "llama", "architectures": ["LlamaForCausalLM"]})[0]


def use(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the installed release be another one."""
    release = dataclasses.replace(accelerate_release(), **changes)
    for module in (accelerate_files, combine, together):
        monkeypatch.setattr(module, "accelerate_release", lambda: release)


def test_every_key_of_the_installed_release_has_a_meaning() -> None:
    release = accelerate_release()
    assert release.version == installed("accelerate")
    sections = {name for name in release.names if name.endswith("_config")}
    assert {"fsdp_config", "deepspeed_config"} <= sections
    assert sorted(name for name in release.names - sections if find("accelerate", name) is None) == []
    of_sections = {
        f"{section}.{name}"
        for section, prefix in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_"))
        for name in release.options
        if name.startswith(prefix)
    } | {*defaults("DEEPSPEED"), *defaults("FSDP")}
    assert len(of_sections) > 15
    assert sorted(key for key in of_sections if find("accelerate", key) is None) == []


def test_defaults_are_those_of_its_launcher_and_plugin(model: str) -> None:
    assert defaults("FSDP")["fsdp_config.fsdp_sharding_strategy"] == "FULL_SHARD"
    assert defaults("MULTI_GPU") == defaults("") == {}
    bare = {**CLUSTER, "distributed_type": "DEEPSPEED"}
    assert read_job([bare], model).load([*OPEN, "train.grad_accum_steps=1"]).config.parallel.strategy == "zero2"
    bare["distributed_type"] = "FSDP"
    job = read_job([bare], model)
    assert (fates(job)["fsdp_config.fsdp_sharding_strategy"], job.loop.get("tail_unit")) == ("default", None)
    assert job.load(OPEN).config.parallel.strategy == "fsdp"
    assert any("rank 0 sends one parameter after another" in row.text for row in job.transfers)
    assert not any("rank 0 sends" in row.text for row in read_job([CLUSTER], model).transfers)


def test_stage_3_shards_while_loading_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    """Accelerate's plugin turns zero.Init on with stage 3."""
    text = ZERO2.replace("zero_stage: 2", "zero_stage: 3")
    for content, early in ((text, False), (text.replace("zero3_init_flag: false, ", ""), True)):
        job = read_job(write(tmp_path, accelerate__yaml=content))
        assert {row.expected for row in job.transfers if "zero3_init_flag: true" in row.text} == {early}


def test_fsdp1_is_sharded_as_its_launcher_says(tmp_path: Path) -> None:
    """The launcher always sets a sharding strategy, so that the plugin never looks at the other key."""
    text = FSDP1.replace("fsdp_sharding_strategy: HYBRID_SHARD", "fsdp_reshard_after_forward: SHARD_GRAD_OP")
    job = read_job(write(tmp_path, accelerate__yaml=text))
    assert job.settings["parallel.reshard_after_forward"] is True
    assert fates(job)["fsdp_config.fsdp_reshard_after_forward"] in ("ignored", "unknown")


def test_a_key_of_a_later_release_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {**CLUSTER, "distributed_type": "FSDP", "fsdp_config": {"fsdp_new_in_99": True, "fsdp_new_in_100": 1}}
    names = accelerate_release().names_in_sections | {"fsdp_new_in_99"}
    use(monkeypatch, version="99.1", names_in_sections=names)
    job = read_job([content])
    assert len(job.not_planned) == 1 and "fsdp_new_in_99=true" in job.not_planned[0]
    assert "the installed Accelerate 99.1 has this key" in job.not_planned[0]
    (note,) = job.notes
    assert "fsdp_new_in_100: unknown to the installed Accelerate 99.1, which ignores it" in note.cause


def test_a_key_that_the_installed_release_lacks_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    release = accelerate_release()
    use(monkeypatch, names_in_sections=release.names_in_sections - {"fsdp_version"}, version="1.0.0",
        names=release.names - {"parallelism_config"})  # fmt: skip
    text = FSDP2 + "parallelism_config: {parallelism_config_dp_replicate_size: 2}\n"
    job = read_job(write(tmp_path, accelerate__yaml=text))
    assert (job.settings["parallel.strategy"], job.loop.get("tail_unit")) == ("fsdp", None)
    causes = " ".join(note.cause for note in job.notes)
    assert "fsdp_version: unknown to the installed Accelerate 1.0.0, which ignores it" in causes
    assert "dp_replicate_size: unknown to the installed Accelerate 1.0.0, which refuses it" in causes
    assert not any("fsdp_version?" in note.fix for note in job.notes)


@OF_THE_NEWEST
def test_the_newest_release_knows_fsdp2(tmp_path: Path) -> None:
    job = read_job(write(tmp_path, accelerate__yaml=FSDP2.replace("forward: true", "forward: false")))
    assert not job.notes and job.loop["tail_unit"]
    assert job.settings["parallel.reshard_after_forward"] is False


def test_keys_of_before_are_read_as_accelerate_converts_them(model: str) -> None:
    job = read_job([{**CLUSTER, "fp16": True, "dynamo_backend": "INDUCTOR"}], model)
    config = job.load(OPEN).config
    assert (config.precision.mode, config.compile.enabled) == ("fp16", True)
    assert not job.notes


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ({"num_processes": 2, "num_machines": 1}, "`distributed_type` must be specified in the config file"),
        ({**CLUSTER, "distributed_type": "MULTI_GPUS"}, "'MULTI_GPUS' is not a valid DistributedType"),
        ({**CLUSTER, "compute_environment": "MY_MACHINE"}, "'MY_MACHINE' is not a valid ComputeEnvironment"),
        ({**CLUSTER, "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"}, "a job of Amazon SageMaker"),
    ],
)
def test_what_accelerate_refuses_is_refused_in_its_words(content: dict[str, Any], cause: str, tmp_path: Path) -> None:
    for source in (content, *write(tmp_path, accelerate__yaml=content)):
        with pytest.raises(ConfigError, match=re.escape(cause)) as refused:
            read_job([source])
        assert "\n" not in refused.value.cause and refused.value.fix


@pytest.mark.parametrize("odd", [None, {}, {"a": 1}, [], [{}], True, -1, 1.5, "", "x"])
def test_odd_values_are_refused_or_read(odd: Any) -> None:
    for key in (*sorted(accelerate_release().names), "fp16", "dynamo_backend"):
        for kind in ("FSDP", "DEEPSPEED"):
            with suppress(ConfigError):
                assert read_job([{**CLUSTER, "distributed_type": kind, key: odd}]).file_keys


def test_a_variable_with_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults.cache_clear()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "two")
    with pytest.raises(ConfigError, match="a variable of Accelerate has a wrong value"):
        read_job([{**CLUSTER, "distributed_type": "DEEPSPEED"}])
    monkeypatch.undo()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "/dev/zero")
    assert defaults("DEEPSPEED")["deepspeed_config.zero_stage"] == 2
    defaults.cache_clear()


def test_an_accelerate_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accelerate_release.cache_clear()
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match="which reads its own files, cannot be imported") as refused:
        read_job(write(tmp_path, accelerate__yaml=DDP))
    assert "install accelerate 1.0.0 to " in refused.value.fix
    accelerate_release.cache_clear()


def test_a_release_is_compared_by_section_and_name() -> None:
    release = Accelerate("1.0", frozenset({"debug", "fsdp_config"}), frozenset({"fsdp_version"}))
    known = ["debug", "fsdp_config", "fsdp_config.fsdp_version", "fsdp_config.fsdp_version.x"]
    unknown = ["fsdp_version", "debug.x", "fp8_config.fsdp_version"]
    assert [key for key in known + unknown if release.knows(key)] == known
