"""Configs here become files of other tools, which their own parsers read and which mean the same when read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.config.foreign.lint import check
from shardkit.config.foreign.translate import read_job
from shardkit.config.foreign.write import To, Written, write
from shardkit.config.load import load_config
from shardkit.errors import ConfigError

from .test_lint import causes
from .test_translate import MODEL

BASE = {
    "train.micro_batch_size": 3,
    "train.grad_accum_steps": 2,
    "train.max_norm": 0.7,
    "train.max_steps": 500,
    "optim.lr": 1e-4,
    "optim.weight_decay": 0.05,
    "optim.betas": [0.9, 0.98],
    "optim.warmup_steps": 20,
    "precision.mode": "bf16",
}
ENGINES: list[dict[str, Any]] = [
    {"parallel.strategy": "ddp", "activation.policy": "full", "parallel.bucket_mb": 50},
    {"parallel.strategy": "fsdp", "activation.policy": "full", "parallel.reshard_after_forward": False},
    {"parallel.strategy": "fsdp", "parallel.offload_param": "cpu"},
    {"parallel.strategy": "zero1", "precision.mode": "fp16"},
    {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu", "train.max_norm": None},
    {"parallel.strategy": "zero3", "parallel.offload_param": "cpu", "optim.schedule": "constant"},
]
OF_THE_ENGINE = ("parallel.strategy", "parallel.reshard_after_forward", "parallel.offload_optimizer")
OF_THE_ENGINE += ("parallel.offload_param", "precision.mode")
OF_THE_STEP = ("train.micro_batch_size", "train.grad_accum_steps", "train.max_norm")
OF_THE_OPTIMIZER = ("optim.name", "optim.lr", "optim.betas", "optim.eps", "optim.weight_decay", "optim.schedule")
KEPT: dict[str, tuple[str, ...]] = {
    "accelerate": OF_THE_ENGINE,
    "deepspeed": (*OF_THE_ENGINE, *OF_THE_STEP, *OF_THE_OPTIMIZER, "optim.min_lr_ratio"),
    "trainer": (*OF_THE_ENGINE, *OF_THE_STEP, *OF_THE_OPTIMIZER, "optim.min_lr_ratio", "train.max_steps", "train.seed"),
}


def written(to: To, settings: dict[str, Any], gpus: int = 8) -> Written:
    return write(load_config(None, {**BASE, **settings}).config, to, gpus)


def value(config: Any, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("to", ["accelerate", "deepspeed", "trainer"])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: "-".join(map(str, engine.values())))
def test_a_written_file_means_the_same_when_read_back(to: To, engine: dict[str, Any], tmp_path: Path) -> None:
    if to == "deepspeed" and not engine["parallel.strategy"].startswith("zero"):
        pytest.skip("DeepSpeed has ZeRO only")
    if to == "accelerate":
        engine = {key: setting for key, setting in engine.items() if key != "parallel.bucket_mb"}
    file = tmp_path / ("ds.json" if to == "deepspeed" else f"{to}.yaml")
    file.write_text(written(to, engine).text)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    found = read_job([str(file)], str(tmp_path), 8)
    there = found.load(["train.seq_len=64", "train.micro_batch_size=3"]).config
    here = load_config(None, {**BASE, **engine}).config
    assert {key: value(there, key) for key in KEPT[to]} == {key: value(here, key) for key in KEPT[to]}
    assert causes(check([str(file)], gpus=8)) == "", "shardkit check has nothing to say"


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine["parallel.strategy"]))
def test_accelerates_own_parser_reads_its_file(engine: dict[str, Any], tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    file = tmp_path / "accelerate.yaml"
    settings = {key: setting for key, setting in engine.items() if key != "parallel.bucket_mb"}
    file.write_text(written("accelerate", settings, 16).text)
    read = config_args.load_config_from_file(str(file))
    assert (read.num_processes, read.num_machines) == (16, 2)
    kinds = {"ddp": "MULTI_GPU", "fsdp": "FSDP"}
    assert read.distributed_type.value == kinds.get(engine["parallel.strategy"], "DEEPSPEED")
    assert read.mixed_precision == engine.get("precision.mode", "bf16")


@pytest.mark.parametrize("engine", ENGINES[3:], ids=lambda engine: str(engine["parallel.strategy"]))
def test_transformers_own_parser_reads_deepspeeds_file(engine: dict[str, Any], tmp_path: Path) -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    file = tmp_path / "ds.json"
    file.write_text(written("deepspeed", engine).text)
    read = integration.HfDeepSpeedConfig(str(file))
    assert read.is_zero3() is (engine["parallel.strategy"] == "zero3")
    assert read.is_offload() is any("offload" in key for key in engine)
    assert read.get_value("gradient_clipping") == (engine.get("train.max_norm", 0.7) or 0.0)


def test_deepspeeds_own_classes_accept_its_file(tmp_path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    for engine in ENGINES[3:]:
        tree = json.loads(written("deepspeed", {**engine, "parallel.bucket_mb": 10}).text)
        zero = config.DeepSpeedZeroConfig(**tree["zero_optimization"])
        assert zero.stage == int(engine["parallel.strategy"][-1])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine["parallel.strategy"]))
def test_transformers_own_parser_reads_the_trainers_file(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`HfArgumentParser` refuses unknown keys; the arguments are not constructed, as they would look for GPUs."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", lambda self: None)
    file = tmp_path / "args.yaml"
    file.write_text(written("trainer", engine).text)
    (read,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_yaml_file(str(file))
    assert read.per_device_train_batch_size == 3
    assert read.learning_rate == 1e-4
    assert read.lr_scheduler_type == ("constant_with_warmup" if "optim.schedule" in engine else "cosine_with_min_lr")
    assert bool(read.deepspeed) is engine["parallel.strategy"].startswith("zero")
    assert bool(read.fsdp) is (engine["parallel.strategy"] == "fsdp")


@pytest.mark.parametrize(
    ("to", "settings", "cause"),
    [
        ("deepspeed", {"parallel.strategy": "fsdp"}, "parallel.strategy='fsdp'"),
        ("deepspeed", {"parallel.strategy": "zero2", "optim.name": "adamw8bit"}, "optim.name='adamw8bit'"),
        ("deepspeed", {"parallel.strategy": "zero2", "optim.schedule": "linear"}, "optim.min_lr_ratio=0.1"),
        ("accelerate", {"parallel.strategy": "zero2", "parallel.bucket_mb": 50}, "parallel.bucket_mb=50.0"),
        ("accelerate", {"parallel.strategy": "fsdp", "activation.policy": "sqrt"}, "activation.policy='sqrt'"),
        ("accelerate", {"precision.mode": "tf32"}, "precision.mode='tf32'"),
        ("trainer", {"parallel.strategy": "hsdp"}, "parallel.strategy='hsdp'"),
        ("trainer", {"optim.name": "muon"}, "optim.name='muon'"),
        ("trainer", {"precision.mode": "pure_bf16"}, "precision.mode='pure_bf16'"),
        ("trainer", {"train.ema_decay": 0.99}, "train.ema_decay=0.99"),
    ],
)
def test_a_setting_that_cannot_be_said_there_is_refused(to: To, settings: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(to, settings)
    assert f"{cause} cannot be said in" in caught.value.cause
    assert caught.value.fix


def test_settings_without_a_key_there_are_listed() -> None:
    found = written("accelerate", {"parallel.strategy": "ddp", "model.preset": "124m"})
    assert "model.preset='124m'" in found.unsaid
    assert {"optim.lr=0.0001", "train.grad_accum_steps=2"} <= set(found.unsaid)
    assert not any(setting.startswith("parallel.strategy") for setting in found.unsaid)


def test_hsdp_keeps_its_mesh(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(written("accelerate", {"parallel.strategy": "hsdp"}, 32).text)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = read_job([str(file)], str(tmp_path)).load(["train.seq_len=64", "train.micro_batch_size=3"]).config
    parallel = config.parallel
    assert (parallel.strategy, parallel.dp_replicate, parallel.dp_shard) == ("hsdp", 4, 8)
    assert yaml.safe_load(file.read_text())["fsdp_config"]["fsdp_version"] == 2
