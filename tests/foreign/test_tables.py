"""The tables hold every key that the installed packages know, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardkit.config.libraries import TESTED, installed
from shardkit.foreign.translate import DEEPSPEED, DEEPSPEED_DEFAULTS, find

pytestmark = pytest.mark.skipif(
    installed("deepspeed") != TESTED["deepspeed"][1], reason=f"needs DeepSpeed {TESTED['deepspeed'][1]}"
)


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
        assert sorted(n for n in names - nested if not find("DeepSpeed", f"{section}.{n}")[0]) == [], section
        listed = {
            key.removeprefix(f"{section}.").partition(".")[0] for key in DEEPSPEED if key.startswith(f"{section}.")
        }
        assert sorted(listed - names) == [], section


def test_every_key_at_the_top_of_deepspeeds_file_is_in_the_table() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    source = Path(constants.__file__).with_name("config.py").read_text()
    used = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", source))
    names = {str(getattr(constants, name)) for name in used if hasattr(constants, name)}
    names |= set(re.findall(r"param_dict(?:\.get\(|\[)['\"](\w+)['\"]", source))
    assert len(names) > 20
    tops = {key.partition(".")[0] for key in DEEPSPEED}
    assert sorted(name for name in names if name not in tops) == []


def test_deepspeeds_defaults_are_its_own() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(stage=3)
    for key, value in DEEPSPEED_DEFAULTS.items():
        assert getattr(config, key.rpartition(".")[2]) == value, key
    assert config.prefetch_bucket_size == 50_000_000
