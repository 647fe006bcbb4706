"""The tables hold every key that the installed packages know, and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from shardkit.config.libraries import installed
from shardkit.foreign import tables, tools
from shardkit.foreign.tools import find

PACKAGES = {"accelerate": "accelerate", "deepspeed": "deepspeed", "trainer": "transformers", "peft": "peft"}
pytestmark = pytest.mark.skipif(
    not all(installed(package).startswith(tools.VERSIONS[tool]) for tool, package in PACKAGES.items()),
    reason=f"needs the versions that the tables are of: {tools.VERSIONS}",
)


def keys(tool: str, section: str = "") -> set[str]:
    """Keys of one section of a table, without its sections."""
    prefix = f"{section}." if section else ""
    found = {key.removeprefix(prefix) for key in tools.KEYS[tool] if key.startswith(prefix)}
    return {key.partition(".")[0] for key in found}


def test_every_training_argument_is_in_the_table() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
    assert sorted(set(fields) - keys("trainer")) == []
    of_trl = {"max_length", "max_seq_length"}
    assert sorted(keys("trainer") - set(fields) - of_trl) == []


def test_the_trainers_defaults_are_its_own() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    assert {key: fields[key] for key in tables.TRAINER_DEFAULTS} == tables.TRAINER_DEFAULTS


def test_every_key_of_the_trainers_fsdp_config_is_in_the_table() -> None:
    transformers = pytest.importorskip("transformers")
    source = Path(transformers.__file__).with_name("training_args.py").read_text()
    code = source[source.index("def _process_fsdp_args") :]
    used = set(re.findall(r'fsdp_config(?:\.get\(|\[|\.setdefault\()"(\w+)"', code))
    assert len(used) > 10
    of_xla = {"compute_dtype", "buffer_dtype"}
    assert sorted(used - keys("trainer", "fsdp_config") - of_xla) == []


def test_every_key_of_deepspeeds_sections_is_in_the_table() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    classes = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "bf16": precision.DeepSpeedBF16Config,
        "fp16": precision.DeepSpeedFP16Config,
    }
    for section, model in classes.items():
        names = {field.alias or name for name, field in model.model_fields.items()}
        nested = {name for name in names if f"{section}.{name}" in classes or name in ("zenflow", "leaf_module")}
        assert sorted(n for n in names - nested if find("deepspeed", f"{section}.{n}") is None) == [], section
        table = {key for key in keys("deepspeed", section) if key != "*"}
        assert sorted(table - names) == [], section


def test_every_key_at_the_top_of_deepspeeds_file_is_in_the_table() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    source = Path(constants.__file__).with_name("config.py").read_text()
    used = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", source))
    names = {str(getattr(constants, name)) for name in used if hasattr(constants, name)}
    names |= set(re.findall(r"param_dict(?:\.get\(|\[)['\"](\w+)['\"]", source))
    assert len(names) > 20
    assert sorted(name for name in names if name not in keys("deepspeed")) == []


def test_every_key_of_pefts_lora_file_is_in_the_table() -> None:
    peft = pytest.importorskip("peft")
    fields = {field.name: field.default for field in dataclasses.fields(peft.LoraConfig)}
    assert sorted(set(fields) - keys("peft")) == []
    assert sorted(keys("peft") - set(fields)) == []
    assert {key: fields[key] for key in tables.PEFT_DEFAULTS} == tables.PEFT_DEFAULTS


def test_deepspeeds_defaults_are_its_own() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(stage=3)
    for key, value in {**tables.DEEPSPEED_DEFAULTS, **tables.STAGE3_DEFAULTS}.items():
        section, _, name = key.rpartition(".")
        if section:
            assert getattr(config, name.removeprefix("stage3_")) == value, key


def test_removed_keys_are_those_that_deepspeed_refuses() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    theirs = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    theirs |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert theirs == set(tables.DEEPSPEED_REMOVED)


def test_every_converter_names_keys_that_exist_here() -> None:
    from shardkit.config.errors import section_fields
    from shardkit.foreign.together import PSEUDO

    known = {f"{section}.{key}" for section, fields in section_fields().items() for key in fields}
    for tool, table in tools.KEYS.items():
        for key, entry in table.items():
            ours = ".".join(entry.only.split(".")[:2])
            assert not ours or ours in known or ours in (*PSEUDO, "optim.betas"), (tool, key)
