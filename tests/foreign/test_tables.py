"""The tables hold every key that the installed packages know, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardkit.config.libraries import TESTED, installed
from shardkit.foreign.translate import DEEPSPEED, DEEPSPEED_DEFAULTS

pytestmark = pytest.mark.skipif(
    installed("deepspeed") != TESTED["deepspeed"][1], reason=f"needs DeepSpeed {TESTED['deepspeed'][1]}"
)

OTHERS = """
    steps_per_print dump_state disable_python_gc wall_clock_breakdown memory_breakdown log_level
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor
    gradient_allreduce_op disable_allgather seq_parallel_communication_data_type use_data_before_expert_parallelism
    dataloader_drop_last vocabulary_size managed_gradient_accumulation flops_profiler.* comms_logger.* tensorboard.*
    wandb.* csv_monitor.* comet.* checkpoint.* aio.* timers.* autotuning.* data_efficiency.* datastates_ckpt.*
    monitor_config.* bf16.check_grad_overflow bf16.immediate_grad_update fp16.auto_cast fp16.hysteresis
    fp16.min_loss_scale fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.consecutive_hysteresis
    optimizer.params.* scheduler.* optimizer.legacy_fusion dataloader_config.*
    zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint zero_optimization.legacy_stage1
    zero_optimization.log_trace_cache_warnings zero_optimization.stage3_gather_fp16_weights_on_model_save
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.ignore_unused_parameters
    zero_optimization.compute_grad_norm zero_optimization.pipeline_loading_checkpoint communication_data_type_op
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.enable_sanity_checks
    zero_optimization.override_module_apply zero_optimization.save_muon_momentum_buffer_in_memory torch_autocast.*
    zero_optimization.leaf_module.* zero_optimization.zero_quantized_weights
    zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_gradients
    zero_optimization.zenflow.* weight_quantization.* compile.* zero_optimization.cpu_offload_use_pin_memory
    zero_optimization.offload_optimizer.super_offload zero_optimization.offload_optimizer.cpuadam_cores_perc
    tensor_parallel.* expert_parallel.* hybrid_engine.* activation_checkpointing.* pipeline.*
    bf16.bf16_master_weights_and_grads fp16.fp16_master_weights_and_grads
"""
"""Keys that change no memory, or that `unplanned_effect` knows; a new one belongs here or into the table."""
KNOWN = {*DEEPSPEED, *OTHERS.split()}


def is_known(key: str) -> bool:
    parts = key.split(".")
    return bool(KNOWN & {key, *(".".join([*parts[:end], "*"]) for end in range(1, len(parts)))})


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
        assert sorted(n for n in names - nested if not is_known(f"{section}.{n}")) == [], section
        listed = {key.removeprefix(f"{section}.").partition(".")[0] for key in KNOWN if key.startswith(f"{section}.")}
        assert sorted(listed - names) == [], section


def test_every_key_at_the_top_of_deepspeeds_file_is_in_the_table() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    source = Path(constants.__file__).with_name("config.py").read_text()
    used = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", source))
    names = {str(getattr(constants, name)) for name in used if hasattr(constants, name)}
    names |= set(re.findall(r"param_dict(?:\.get\(|\[)['\"](\w+)['\"]", source))
    assert len(names) > 20
    tops = {key.partition(".")[0] for key in KNOWN}
    assert sorted(name for name in names if name not in tops) == []


def test_deepspeeds_defaults_are_its_own() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(stage=3)
    for key, value in DEEPSPEED_DEFAULTS.items():
        assert getattr(config, key.rpartition(".")[2]) == value, key
    assert config.prefetch_bucket_size == 50_000_000
