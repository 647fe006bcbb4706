"""Keys of the files that tools publish as examples: none is unknown to its tool."""

from __future__ import annotations

from typing import Any

import pytest

from shardkit.foreign import combine
from shardkit.foreign.translate import read_job

from .published import published

BASES: dict[str, dict[str, Any]] = {
    "accelerate": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU"},
    "deepspeed": {"train_micro_batch_size_per_gpu": 1},
    "trainer": {"output_dir": "out", "per_device_train_batch_size": 1},
    "axolotl": {"base_model": "some/model", "micro_batch_size": 1, "sequence_len": 64},
    "llamafactory": {"model_name_or_path": "some/model", "stage": "sft", "do_train": True, "finetuning_type": "full"},
}

UNKNOWN = {
    ("accelerate", "deepspeed_config.seq_parallel_communication_data_type"), ("deepspeed", "_comment"),
    ("deepspeed", "comms_config.verbose"),
    *(("axolotl", f"tokens.{name}_token") for name in ("bos", "eos", "pad", "unk")),
    *(("axolotl", key) for key in (
        "adam_eps", "base_model_ignore_patterns", "context_parapllel_size", "debug", "eta_min", "flash_attn_rms_norm",
        "full_finetune", "gptq_disable_exllama", "gptq_groupsize", "gptq_model_v1", "max_packed_sequence_len",
        "sample_packing_seq_len_multiplier", "test_value", "torch_dtype",
    )),
}  # fmt: skip
"""Misspelt, removed, or never keys: the release whose keys the tables hold ignores or refuses each of them."""


def merged(base: dict[str, Any], key: str) -> dict[str, Any]:
    """A file with one more dotted key, whose value is a switch that is off."""
    tree: Any = False
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return {**tree, **base}


def test_the_list_is_of_hundreds_of_files() -> None:
    most = {tool: max(count for name, _, count in published() if name == tool) for tool in BASES}
    assert sum(most.values()) >= 300 and {tool for tool, _, _ in published()} == {*BASES}


@pytest.mark.parametrize("tool", BASES)
def test_no_key_of_a_published_file_is_unknown_without_reason(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By shardkit's own tables: an installed release, which would be asked for other keys, is hidden."""
    monkeypatch.setattr(combine, "installed_release", lambda tool: None)
    unknown = set()
    for _, key, _ in (line for line in published() if line[0] == tool):
        job = read_job([merged(BASES[tool], key)])
        assert job.files[0].tool == tool
        unknown |= {(tool, key) for file_key in job.file_keys if file_key.fate == "unknown"}
    assert unknown == {pair for pair in UNKNOWN if pair[0] == tool}
