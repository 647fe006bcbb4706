"""Files of Accelerate and DeepSpeed become a config here: key by key, `auto` filled in, contradictions refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.config import capability
from shardkit.errors import ConfigError
from shardkit.foreign.translate import ForeignJob, read_job
from tests.cli.test_main import shardkit

from .samples import BY_FILE, DDP, FSDP1, FSDP2, MODEL, ZERO2, ZERO3, fates, write

OPEN = ["train.seq_len=64", "train.micro_batch_size=2"]


def job(folder: Path, gpus: int | None = None, model: dict[str, Any] = MODEL, **files: Any) -> ForeignJob:
    (folder / "config.json").write_text(json.dumps(model))
    return read_job(write(folder, **files), str(folder), gpus, OPEN)


@pytest.mark.parametrize(
    ("text", "strategy", "precision", "gpus"),
    [
        (FSDP2, "fsdp", "bf16", 16),
        (FSDP1, "hsdp", "bf16", 16),
        (ZERO2, "zero2", "bf16", 8),
        (ZERO2.replace("zero_stage: 2", "zero_stage: 1"), "zero1", "bf16", 8),
        (DDP, "ddp", "fp32", 2),
        (DDP.replace("'no'", "fp16"), "ddp", "fp16", 2),
        (FSDP2 + "use_cpu: true\n", "ddp", "bf16", 16),
        ("distributed_type: 'NO'\nmixed_precision: bf16\n", "single", "bf16", 1),
    ],
)
def test_accelerates_file_names_the_engine(text: str, strategy: str, precision: str, gpus: int, tmp_path: Path) -> None:
    found = job(tmp_path, accelerate__yaml=text)
    config = found.load(OPEN).config
    assert (config.parallel.strategy, config.precision.mode, found.gpus) == (strategy, precision, gpus)
    device = "cpu" if config.run.device == "cpu" else "cuda"
    capability.check(config, device=device, world_size=gpus, local_world_size=min(gpus, 8))
    assert (config.train.micro_batch_size, config.model.loss_chunk_size, config.train.eval_samples) == (2, 0, 0)
    assert found.not_planned == [] and "unknown" not in fates(found).values()


def test_accelerates_fsdp_computes_as_accelerate_does(tmp_path: Path) -> None:
    config = job(tmp_path, accelerate__yaml=FSDP2.replace("forward: true", "forward: false")).load(OPEN).config
    assert (config.precision.reduce_dtype, config.precision.autocast) == ("bf16", False)
    assert config.parallel.reshard_after_forward is False
    older = job(tmp_path, accelerate__yaml=FSDP1)
    assert older.load(OPEN).config.precision.autocast, "FSDP1's forward runs under autocast too"


def test_deepspeeds_own_file_is_planned_and_passed_through(tmp_path: Path) -> None:
    zero = {"stage": 3, "reduce_bucket_size": 1e8, "offload_param": {"device": "cpu"}, "overlap_comm": False}
    file = {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 24, "zero_optimization": zero,
            "fp16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}  # fmt: skip
    found = job(tmp_path, 4, ds__json=json.dumps(file, indent="\t"))
    config = found.load(OPEN[:1]).config
    assert (config.parallel.strategy, config.precision.mode, config.parallel.offload_param) == ("zero3", "fp16", "cpu")
    assert (config.train.micro_batch_size, config.train.grad_accum_steps, config.optim.name) == (3, 2, "adamw")
    passed = config.parallel.ds_config["zero_optimization"]
    assert (passed["reduce_bucket_size"], passed["overlap_comm"]) == (10**8, False)
    assert passed["stage3_prefetch_bucket_size"] == 50_000_000, "DeepSpeed's default, which is not shardkit's"


def test_auto_becomes_what_accelerate_makes_of_it(tmp_path: Path) -> None:
    write(tmp_path, ds__json=ZERO3)
    found = job(tmp_path, accelerate__yaml=BY_FILE)
    config = found.load(OPEN).config
    assert (config.parallel.strategy, config.precision.mode, config.train.micro_batch_size) == ("zero3", "bf16", 2)
    zero = config.parallel.ds_config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert zero["stage3_param_persistence_threshold"] == 640


def test_auto_that_nothing_fills_is_named_with_its_fix(tmp_path: Path) -> None:
    found = read_job(write(tmp_path, ds__json=ZERO3))
    problems = {setting: fix for _, fix, setting in found.problems}
    assert "train.micro_batch_size=4" in problems["train.micro_batch_size"]
    assert "precision.mode=bf16" in problems["precision.mode"]
    assert any("--model" in fix for fix in problems.values())
    with pytest.raises(ConfigError):
        found.load(OPEN)


ZERO2_FILE = {"zero_optimization": {"stage": 2}}
UNPLANNED: dict[str, dict[str, Any]] = {
    "tp_size=4": {"accelerate__yaml": DDP + "parallelism_config: {parallelism_config_tp_size: 4}\n"},
    "torch's ring attention": {"accelerate__yaml": DDP + "parallelism_config: {parallelism_config_cp_size: 4}\n"},
    "distributed_type=": {"accelerate__yaml": DDP.replace("MULTI_GPU", "MEGATRON_LM")},
    "zero_quantized_gradients": {"ds__json": {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}},
    "compile.deepcompile=true": {"ds__json": {**ZERO2_FILE, "compile": {"deepcompile": True}}},
    "optimizer.type=": {"ds__json": {**ZERO2_FILE, "optimizer": {"type": "OneBitAdam"}}},
    "torch_autocast.enabled": {"ds__json": {**ZERO2_FILE, "torch_autocast": {"enabled": True}}},
}


@pytest.mark.parametrize("line", UNPLANNED)
def test_a_key_that_changes_memory_is_not_planned(line: str, tmp_path: Path) -> None:
    (reason,) = job(tmp_path, 8, **UNPLANNED[line]).not_planned
    assert reason.startswith("not planned: ") and line in reason


@pytest.mark.parametrize("tool", ["Accelerate", "DeepSpeed"])
def test_sequences_split_by_ulysses_are_planned(tool: str, tmp_path: Path) -> None:
    ds = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
    files: dict[str, Any] = {"ds__json": {**ds, "sequence_parallel_size": 4}}
    if tool == "Accelerate":
        sizes = "{parallelism_config_sp_size: 4, parallelism_config_sp_backend: deepspeed}"
        files = {"ds__json": ds, "accelerate__yaml": BY_FILE + f"parallelism_config: {sizes}\n"}
    found = job(tmp_path, 8, **files)
    assert found.not_planned == []
    config = found.load(OPEN[:1]).config
    assert (config.parallel.cp, config.train.micro_batch_size, config.train.grad_accum_steps) == (4, 2, 2)
    capability.check(config, device="cuda", world_size=8, local_world_size=8)


def test_sizes_of_one_and_switches_that_are_off_change_nothing(tmp_path: Path) -> None:
    off = {"zero_optimization": {"stage": 2, "zero_quantized_weights": False}, "tensor_parallel": {"autotp_size": 1}}
    assert job(tmp_path, 8, ds__json=off).not_planned == []


def test_a_misspelt_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    found = job(tmp_path, 8, ds__json={"zero_optimization": {"stage": 2, "overlap_com": True}})
    assert fates(found)["zero_optimization.overlap_com"] == "unknown"
    assert any("did you mean zero_optimization.overlap_comm?" in line for line in found.mapping())


@pytest.mark.parametrize(
    ("files", "setting"),
    [
        ({"ds__json": {"bf16": {"enabled": True}, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}},
         "precision.mode"),
        ({"ds__json": {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
                       "zero_optimization": {"stage": 2}}}, "train.micro_batch_size"),
        ({"accelerate__yaml": BY_FILE, "ds__json": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}},
         "precision.mode"),
        ({"ds__json": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}}, "parallel.strategy"),
    ],
)  # fmt: skip
def test_a_contradiction_is_a_problem_that_the_command_line_settles(
    files: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    found = job(tmp_path, 8, **files)
    assert setting in {problem[2] for problem in found.problems}
    with pytest.raises(ConfigError):
        found.load(["train.seq_len=64", *([] if setting == "train.micro_batch_size" else OPEN[1:])])


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "encoder-decoder": ({**MODEL, "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
                        "shardkit rehearse -- "),
    "head without a task": ({**MODEL, "architectures": ["LlamaForTokenClassification"]}, "shardkit rehearse -- "),
    "no model": ({"a": 1}, "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_no_task_trains_is_pointed_to_the_rehearsal(case: str, tmp_path: Path) -> None:
    model, fix = MODELS[case]
    with pytest.raises(ConfigError) as refused:
        job(tmp_path, 2, model=model, accelerate__yaml=DDP).load(OPEN)
    assert fix in refused.value.fix


def test_memory_of_their_loop_beyond_the_plan_is_listed_with_its_size(tmp_path: Path) -> None:
    found = job(tmp_path, accelerate__yaml=DDP.replace("'no'", "bf16"))
    lines = list(found.unplanned_memory(n_params=10**9, tokens=2**20, needed=10, limit=2**30))
    assert any("buckets" in line and "3.73 GiB at most" in line for line in lines)
    assert any("half-precision logits" in line for line in lines)
    assert lines[-1].startswith("the job may not fit")
    assert not list(found.unplanned_memory(10**9, 2**20, 10, 2**50))[-1].startswith("the job may not fit")


AXOLOTL = "base_model: x\nadapter: lora\nlora_r: 16\nmicro_batch_size: 1\n"
REMOVED = {
    "axolotl": (AXOLOTL, "-- axolotl train"),
    "LLaMA-Factory": ("model_name_or_path: x\nfinetuning_type: lora\ncutoff_len: 8\n", "-- llamafactory-cli train"),
    "TRL": ("model_name_or_path: x\nuse_peft: true\nper_device_train_batch_size: 2\n", "-- trl sft --config"),
    "transformers' Trainer": ("output_dir: x\nbf16: true\nper_device_train_batch_size: 2\n", "-- python train.py"),
}


@pytest.mark.parametrize("tool", REMOVED)
@pytest.mark.parametrize("command", [("plan", "--from"), ("plan",), ("launch",)])
def test_a_file_of_a_tool_that_is_rehearsed_says_so(
    tool: str, command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = REMOVED[tool]
    assert shardkit(*command, *write(tmp_path, recipe__yaml=text)) == 2
    cause, fix = capsys.readouterr().err.splitlines()
    assert f"is a file of {tool}" in cause and "shardkit rehearse" in fix and words in fix


@pytest.mark.slow
def test_the_command_prints_every_key_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    text = FSDP2.replace("num_machines: 2\nnum_processes: 16", "num_processes: 4")
    files = write(tmp_path, accelerate__yaml=text)
    words = ("plan", "--from", *files, "--model", tmp_path, *OPEN, "run.device=cpu")
    assert shardkit(*words) == 0
    out = capsys.readouterr().out
    assert "→ parallel.strategy=fsdp" in out and "accelerate.yaml: fsdp on 4 × cpu" in out
    assert "model.loss_chunk_size=0" in out.partition("set because the loop differs")[2]
    assert "not part of the plan" in out.partition("at the peak")[2]
    unplanned = write(tmp_path, accelerate__yaml=text + "parallelism_config: {parallelism_config_tp_size: 2}\n")
    assert shardkit(*("plan", "--from", *unplanned, "--model", tmp_path, *OPEN, "run.device=cpu", "--json")) == 7
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "not planned" and len(found["from"]["not_planned"]) == 1
