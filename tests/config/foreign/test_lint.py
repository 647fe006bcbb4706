"""`shardkit check`: faults are named, and files without a fault have no finding."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.config.foreign import tools
from shardkit.config.foreign.lint import Finding, check
from shardkit.config.foreign.translate import read_job
from shardkit.errors import ConfigError

BROKEN = Path(__file__).parent / "broken"
WORKS_TODAY = {"auto-with-accelerate"}
"""Accelerate 1.0 failed on it; later versions fill in the value before `zero.Init` sees it."""


def write(folder: Path, **files: Any) -> list[str]:
    """Files by name, dots as two underscores; text as it is, anything else as JSON."""
    names = []
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        names.append(str(path))
    return names


def causes(found: list[Finding]) -> str:
    return "\n".join(f"{one.level}: {one.cause} | {one.fix}" for one in found)


def named(case: dict[str, Any], folder: Path) -> bool:
    """Whether one finding has all the words that were fixed beforehand."""
    names = [folder / name for name in case["files"]]
    for path in names:
        path.write_text(case["files"][path.name])
    found = check([str(path) for path in names])
    return finds(found, case["names"])


@pytest.mark.parametrize(("folder", "count"), [("", 30), ("later", 10)])
def test_broken_configs_from_public_threads_are_named(
    folder: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = set()
    paths = sorted((BROKEN / folder).glob("*.yaml"))
    for path in paths:
        place = tmp_path / path.stem
        place.mkdir()
        monkeypatch.chdir(place)
        case = yaml.safe_load(path.read_text())
        assert case["thread"].startswith("https://github.com/")
        if not named(case, place):
            missed.add(path.stem)
    assert len(paths) == count
    assert missed - WORKS_TODAY == set()


ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "steps_per_print": 100,
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "max_live_parameters": 1e9, "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}  # fmt: skip
TRAINER = "output_dir: out\nbf16: true\nlearning_rate: 2.0e-5\nlr_scheduler_type: cosine\nrun_name: '7'\n"
FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
FSDP1 = FSDP2.replace("fsdp_version: 2", "fsdp_version: 1\n  fsdp_sync_module_states: true").replace(
    "fsdp_reshard_after_forward: true", "fsdp_sharding_strategy: HYBRID_SHARD"
)
BY_FILE = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 8
"""
DUMMIES = {
    **ZERO3,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
}
"""As Accelerate's own templates have it: `DummyOptim` and `DummyScheduler` in the script fill it in."""
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n"
ZERO2 = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 1.0, zero3_init_flag: false, zero_stage: 2,
  offload_optimizer_device: none, offload_param_device: none}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


@pytest.mark.parametrize(
    "files",
    [
        {"ds__json": ZERO3, "args__yaml": TRAINER},
        {"accelerate__yaml": FSDP2},
        {"accelerate__yaml": FSDP1},
        {"accelerate__yaml": ZERO2, "args__yaml": TRAINER + "gradient_accumulation_steps: 4\n"},
        {"accelerate__yaml": DDP, "args__yaml": TRAINER},
        {"accelerate__yaml": BY_FILE, "ds__json": DUMMIES},
        {"args__yaml": TRAINER + "fsdp: true\nfsdp_config: {activation_checkpointing: true}\n"},
    ],
)  # fmt: skip
def test_files_without_a_fault_have_no_finding(files: dict[str, Any], tmp_path: Path) -> None:
    assert causes(check(write(tmp_path, **files))) == ""


def without(tree: dict[str, Any], section: str, key: str) -> dict[str, Any]:
    return {**tree, section: {name: value for name, value in tree[section].items() if name != key}}


ACCELERATE = [
    (FSDP2.replace("reshard_after_forward: true", "reshard_after_forward: FULL_SHARD"), ["true or false"]),
    (FSDP2.replace("fsdp_offload_params", "fsdp_forward_prefetch: true\n  fsdp_offload_params"), ["forward_prefetch"]),
    (FSDP2.replace("fsdp_offload_params", "fsdp_use_orig_params: true\n  fsdp_offload_params"), ["use_orig_params"]),
    (FSDP2.replace("SHARDED_STATE_DICT", "LOCAL_STATE_DICT"), ["LOCAL_STATE_DICT"]),
    (FSDP2.replace("num_processes: 16", "num_processes: 15"), ["num_processes=15"]),
    (FSDP2.replace("offload_params", "ofload_params"), ["ignores", "did you mean fsdp_config.fsdp_offload_params"]),
    (FSDP2.replace("distributed_type: FSDP", "distributed_type: MULTI_GPU"), ["fsdp_version", "does nothing"]),
    (ZERO2.replace("zero3_init_flag: false", "zero3_init_flag: true"), ["zero3_init_flag"]),
    ("distributed_type: MULTI_GPU\nnum_processes: 1\n", ["num_processes=1"]),
    ("distributed_type: NO\nnum_proceses: 1\n", ["refuses", "num_processes"]),
]
DEEPSPEED = [
    (without(ZERO3, "zero_optimization", "stage"), ["stage3_", "stage is 0"]),
    ({**ZERO3, "amp": {"enabled": True}}, ["amp.enabled", "removed"]),
    ({**ZERO3, "gradient_cliping": 1.0}, ["ignores", "gradient_clipping"]),
    ({**ZERO3, "bf16": {"enabled": "auto", "loss_scale_window": 100}}, ["refuses", "bf16.loss_scale_window"]),
    ({**ZERO3, "train_batch_size": 7, "gradient_accumulation_steps": 4}, ["gradient_accumulation_steps"]),
    ({**ZERO3, "zero_optimization": {**ZERO3["zero_optimization"], "stage": 4}}, ["stage=4", "none of the stages"]),
    ({**ZERO3, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, ["warmup_num_steps=0"]),
]
ARGUMENTS = [
    ("fsdp: hybrid_shard auto_wrap\n", ["hybrid_shard", "FSDP1"]),
    ("gradient_checkpointing: true\nddp_find_unused_parameters: true\n", ["twice"]),
    ("eval_strategy: steps\neval_steps: 300\nsave_steps: 500\nload_best_model_at_end: true\n", ["save_steps=500"]),
    ("fp16: true\n", ["fp16=true", "bf16=true"]),
    ("deepspeed: {zero_optimization: {stage: 2, offload_param: {device: cpu}}}\n", ["offload_param", "stage is 2"]),
    ("no_cuda: true\n", ["refuses", "use_cpu"]),
    ("gradient_accumulation_steps: 1.5\n", ["gradient_accumulation_steps=1.5", "not a whole number"]),
    ("optim: adamw_hf\n", ["optim='adamw_hf'", "no such value"]),
    ("gradient_checkpointing: 'false'\n", ["gradient_checkpointing", "counts as true"]),
    ("fsdp_version: 2\n", ["fsdp_config.version"]),
]


def finds(found: list[Finding], words: list[str]) -> bool:
    return any(all(word in f"{one.cause} {one.fix}" for word in words) for one in found)


@pytest.mark.parametrize(("text", "words"), ACCELERATE)
def test_a_fault_in_accelerates_file_is_named(text: str, words: list[str], tmp_path: Path) -> None:
    found = check(write(tmp_path, accelerate__yaml=text))
    assert finds(found, words), causes(found)


@pytest.mark.parametrize(("tree", "words"), DEEPSPEED)
def test_a_fault_in_deepspeeds_file_is_named(tree: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    found = check(write(tmp_path, ds__json=tree, args__yaml=TRAINER))
    assert finds(found, words), causes(found)


@pytest.mark.parametrize(("more", "words"), ARGUMENTS)
def test_a_fault_in_the_trainers_file_is_named(more: str, words: list[str], tmp_path: Path) -> None:
    found = check(write(tmp_path, args__yaml=TRAINER + more))
    assert finds(found, words), causes(found)


def test_fp16_on_a_bf16_checkpoint_is_named(tmp_path: Path) -> None:
    model = {"model_type": "llama", "dtype": "bfloat16"}
    found = check(write(tmp_path, args__yaml=TRAINER.replace("bf16", "fp16"), config__json=model))
    assert finds(found, ["fp16 with llama"]), causes(found)
    assert check(write(tmp_path, args__yaml=TRAINER, config__json=model)) == []


def test_a_number_that_yaml_takes_for_text_is_written_so_that_it_does_not(tmp_path: Path) -> None:
    (found,) = check(write(tmp_path, args__yaml="learning_rate: 5e-5\n"))
    value = found.fix.removeprefix("write ")
    assert yaml.safe_load(value) == {"learning_rate": 5e-5}


@pytest.mark.parametrize(
    ("content", "cause", "fix"),
    [
        ('{"zero_optimization": {"stage": 2', "ds.json:1: not JSON", "ends early"),
        ('{"zero_optimization": {"stage": 2},}', "ds.json:1: not JSON", "trailing"),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', "set twice", ""),
        ("distributed_type: [NO\n", "not YAML", ""),
        ("- 1\n", "a list", ""),
        ("", "empty", ""),
        ("train: {max_steps: 3}\n", "of shardkit itself", "without --from"),
        ("apiVersion: v1\nkind: Pod\n", "no config of Accelerate", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_one_cause_and_one_fix(
    content: str, cause: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(write(tmp_path, ds__json=content))
    assert cause in caught.value.cause
    assert fix in caught.value.fix
    assert "\n" not in caught.value.cause + caught.value.fix


def test_a_checkpoint_at_any_moment_goes_wrong_under_deepspeed_alone(tmp_path: Path) -> None:
    jit = TRAINER + "enable_jit_checkpoint: true\n"
    assert finds(
        check(write(tmp_path, args__yaml=jit, ds__json=ZERO3)), ["enable_jit_checkpoint=true", "one update more"]
    )
    assert check(write(tmp_path, args__yaml=jit)) == []


def test_two_files_of_one_tool_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both files of DeepSpeed"):
        check(write(tmp_path, a__json=ZERO3, b__json=ZERO3))


def test_a_binary_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    for name in ("x.json", "gone.json", "."):
        with pytest.raises(ConfigError) as caught:
            check([str(tmp_path / name)])
        assert caught.value.fix


STRANGE = [True, "x", [1], -1, {"a": 1}]
BASES = {
    "accelerate": [{"distributed_type": kind} for kind in ("FSDP", "DEEPSPEED")],
    "deepspeed": [{"zero_optimization": {"stage": 3}}],
    "trainer": [{"output_dir": "out", "fsdp": True}],
}


@pytest.mark.parametrize("tool", BASES)
def test_no_value_of_any_key_is_a_traceback(tool: str, tmp_path: Path) -> None:
    """Nobody checks the types of these files before: every key gets values of every kind."""
    model = tmp_path / "config.json"
    model.write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    for key in tools.KEYS[tool]:
        for base in BASES[tool]:
            for value in STRANGE:
                tree = json.loads(json.dumps(base))
                *sections, name = key.replace(".*", ".other").split(".")
                inner = tree
                for section in sections:
                    inner[section] = inner[section] if isinstance(inner.get(section), dict) else {}
                    inner = inner[section]
                inner[name] = value
                names = write(tmp_path, file__json=tree)
                with contextlib.suppress(ConfigError):
                    check(names, str(model))
                with contextlib.suppress(ConfigError):
                    read_job(names, str(model), 2).load(["train.seq_len=8", "train.micro_batch_size=1"])
