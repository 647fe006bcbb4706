"""Recipes of axolotl, LLaMA-Factory and TRL: read as their tools read them, and refused where no plan has a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.errors import ConfigError, NotPlannedError
from shardkit.foreign.axolotl import AXOLOTL_REMOVED
from shardkit.foreign.combine import unknown_key
from shardkit.foreign.rewrite import NoKey, change_files
from shardkit.foreign.tools import KEYS, RECIPES, find
from shardkit.foreign.translate import ForeignJob, read_job

from .samples import MODEL, TRAINER, ZERO3, fates, write

AXOLOTL = """\
base_model: some/model
model_type: LlamaForCausalLM
datasets:
  - {path: mine.jsonl, type: chat_template, roles_to_train: [assistant]}
dataset_prepared_path: prepared
val_set_size: 0.05
output_dir: out
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
sequence_len: 64
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
flash_attention: true
warmup_ratio: 0.1
special_tokens: {pad_token: "<pad>"}
wandb_project: mine
"""
LLAMA_FACTORY = """\
model_name_or_path: some/model
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: identity
template: llama3
cutoff_len: 64
packing: true
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine_with_restarts
warmup_ratio: 0.1
bf16: true
plot_loss: true
"""
TRL = """\
model_name_or_path: some/model
dataset_name: some/data
use_peft: true
lora_r: 32
lora_target_modules: [q_proj]
max_length: 64
packing: true
per_device_train_batch_size: 2
learning_rate: 1.0e-4
dtype: bfloat16
"""


QLORA = {"adapter": "qlora", "load_in_4bit": True}


def recipe(folder: Path, text: str, **more: Any) -> ForeignJob:
    """The job of one recipe, with keys replaced or, with `None`, removed."""
    (folder / "config.json").write_text(json.dumps(more.pop("model", MODEL)))
    files = more.pop("files", {})
    keys = {key: value for key, value in {**yaml.safe_load(text), **more}.items() if value is not None}
    return read_job(write(folder, recipe__json=keys, **files), str(folder), 2)


@pytest.mark.parametrize(
    ("text", "tool", "expected"),
    [
        (AXOLOTL, "axolotl", {"adapter.r": 16, "adapter.alpha": 32, "adapter.dropout": 0.05, "adapter.targets": [
            "q_proj", "v_proj"], "train.micro_batch_size": 2, "train.grad_accum_steps": 4, "train.seq_len": 64,
            "optim.name": "adamw_bnb_8bit", "precision.mode": "bf16", "activation.policy": "full", "optim.lr": 2e-4}),
        (LLAMA_FACTORY, "llamafactory", {"adapter.r": 8, "adapter.alpha": 16, "adapter.dropout": 0.0,
            "adapter.targets": ["q_proj", "v_proj"], "train.micro_batch_size": 1, "train.grad_accum_steps": 8,
            "train.seq_len": 64, "optim.name": "adamw", "precision.mode": "bf16", "activation.policy": "full"}),
        (TRL, "trl", {"adapter.r": 32, "adapter.alpha": 32, "adapter.dropout": 0.05, "adapter.targets": ["q_proj"],
            "train.micro_batch_size": 2, "train.seq_len": 64, "precision.mode": "bf16", "activation.policy": "full"}),
    ],
)  # fmt: skip
def test_a_recipe_is_read_as_its_tool_reads_it(text: str, tool: str, expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    job = read_job(write(tmp_path, recipe__yaml=text), str(tmp_path), 2)
    assert job.files[0].tool == tool
    assert set(fates(job).values()) <= {"mapped", "default", "absent"}
    assert job.not_planned == [] and job.problems == ()
    assert {key: job.settings[key] for key in expected} == expected
    config = job.load().config
    assert (config.adapter.type, config.parallel.strategy) == ("lora", "ddp")
    assert config.optim.betas == (0.9, 0.999), "the Trainer's default"
    assert job.loop["frozen"] == "bfloat16"


@pytest.mark.parametrize("four_bits", [None, False])
def test_qlora_without_its_switch_is_refused_as_axolotl_refuses_it(four_bits: bool | None, tmp_path: Path) -> None:
    job = recipe(tmp_path, AXOLOTL, adapter="qlora", load_in_4bit=four_bits)
    (problem,) = job.problems
    assert "adapter=qlora without load_in_4bit=true, which axolotl refuses" in problem.cause
    assert "load_in_4bit: true, or adapter: lora" in problem.fix
    assert recipe(tmp_path, AXOLOTL, **QLORA).problems == ()


def test_the_model_of_a_recipe_is_the_folder_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(MODEL))
    (file,) = write(tmp_path, recipe__yaml=AXOLOTL.replace("some/model", "llama"))
    assert read_job([file]).load().config.model.hf_config == str((tmp_path / "llama").resolve())
    (file,) = write(tmp_path, recipe__yaml=AXOLOTL)
    with pytest.raises(ConfigError, match="base_model=some/model is no folder") as caught:
        read_job([file]).load()
    assert "--model" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "more", "key"),
    [
        (AXOLOTL, {"load_in_4bit": True}, "load_in_4bit"),
        (AXOLOTL, {**QLORA, "bf16": False, "bfloat16": True}, "load_in_4bit"),
        (AXOLOTL, {**QLORA, "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, "load_in_4bit"),
        (AXOLOTL, {**QLORA, "deepspeed": ZERO3}, "load_in_4bit"),
        (AXOLOTL, {**QLORA, "torch_compile": True}, "load_in_4bit"),
        (AXOLOTL, {**QLORA, "model": {**MODEL, "num_local_experts": 8}}, "load_in_4bit"),
        (AXOLOTL, {**QLORA, "model": {**MODEL, "intermediate_size": 96}}, "load_in_4bit"),
        (AXOLOTL, {**QLORA, "model": {**MODEL, "model_type": "gpt2"}}, "load_in_4bit"),
        (
            AXOLOTL,
            {**QLORA, "bnb_config_kwargs": {"llm_int8_skip_modules": ["o_proj"]}},
            "bnb_config_kwargs.llm_int8_skip_modules",
        ),
        (AXOLOTL, {"optimizer": "paged_adamw_8bit"}, "optimizer"),
        (AXOLOTL, {"rl": "dpo"}, "rl"),
        (AXOLOTL, {"gradient_checkpointing": "offload"}, "gradient_checkpointing"),
        (AXOLOTL, {"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save"),
        (AXOLOTL, {"eager_attention": True}, "eager_attention"),
        (AXOLOTL, {"attn_implementation": "flex_attention"}, "attn_implementation"),
        (AXOLOTL, {"trl": {"num_generations": 8}}, "trl.num_generations"),
        (AXOLOTL, {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}, "plugins"),
        (AXOLOTL, {"context_parallel_size": 2}, "context_parallel_size"),
        (LLAMA_FACTORY, {"quantization_bit": 8}, "quantization_bit"),
        (LLAMA_FACTORY, {"quantization_bit": 4, "bf16": False}, "quantization_bit"),
        (LLAMA_FACTORY, {"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method"),
        (LLAMA_FACTORY, {"quantization_bit": 4, "finetuning_type": "full"}, "quantization_bit"),
        (TRL, {"load_in_4bit": True}, "load_in_4bit"),
        (LLAMA_FACTORY, {"stage": "dpo"}, "stage"),
        (LLAMA_FACTORY, {"finetuning_type": "freeze"}, "finetuning_type"),
        (LLAMA_FACTORY, {"use_badam": True}, "use_badam"),
        (LLAMA_FACTORY, {"flash_attn": "disabled"}, "flash_attn"),
        (LLAMA_FACTORY, {"pipeline_model_parallel_size": 4}, "pipeline_model_parallel_size"),
        (TRL, {"load_in_8bit": True}, "load_in_8bit"),
        (TRL, {"num_generations": 8}, "num_generations"),
        (TRL, {"loss_type": "dft"}, "loss_type"),
    ],
)
def test_a_known_key_that_no_plan_has_is_named(text: str, more: dict[str, Any], key: str, tmp_path: Path) -> None:
    job = recipe(tmp_path, text, **more)
    assert fates(job)[key] == "unplanned"
    (line,) = (line for line in job.not_planned if f"not planned: {key}=" in line)
    assert "recipe.json" in line
    assert "unknown" not in fates(job).values()
    with pytest.raises(NotPlannedError):
        job.refuse_unplanned()
    assert job.load().config.train.micro_batch_size, "the rest is planned"


@pytest.mark.parametrize(
    ("text", "more", "kind", "double"),
    [
        (AXOLOTL, QLORA, "nf4", True),
        (AXOLOTL, {**QLORA, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, "nf4", False),
        (AXOLOTL, {**QLORA, "bf16": False, "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}}, "fp4", True),
        (LLAMA_FACTORY, {"quantization_bit": 4}, "nf4", True),
        (LLAMA_FACTORY, {"quantization_bit": "4", "quantization_method": "bnb", "double_quantization": False,
                         "quantization_type": "fp4"}, "fp4", False),
    ],
)  # fmt: skip
def test_a_base_in_4_bits_is_planned_as_its_tool_packs_it(
    text: str, more: dict[str, Any], kind: str, double: bool, tmp_path: Path
) -> None:
    """Whole on every rank, by bitsandbytes' layers and peft's for them, under DDP and ZeRO-2."""
    for engine, deepspeed in (("ddp", None), ("zero2", {**ZERO3, "zero_optimization": {"stage": 2}})):
        job = recipe(tmp_path, text, **more, deepspeed=deepspeed)
        assert job.not_planned == [] and job.loop["bnb_layers"] is True
        quantize = job.load().config.model.quantize
        assert quantize is not None
        assert (quantize.bits, quantize.type, quantize.double, quantize.block_size) == (4, kind, double, 64)
        assert job.load().config.parallel.strategy == engine
        assert {moment.phase for moment in job.transfers} == ({"loading"} if engine == "ddp" else {"loading", "saving"})


def test_a_base_in_4_bits_that_is_off_is_not_planned(tmp_path: Path) -> None:
    for text, more in (
        (AXOLOTL, {"load_in_4bit": False, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": True}}),
        (LLAMA_FACTORY, {"quantization_bit": 0, "double_quantization": True}),
    ):
        job = recipe(tmp_path, text, **more)
        assert job.not_planned == [] and job.load().config.model.quantize is None and "bnb_layers" not in job.loop


def test_no_change_shards_a_base_in_4_bits_as_its_tool_would_not(tmp_path: Path) -> None:
    job = recipe(tmp_path, AXOLOTL, **QLORA)
    with pytest.raises(NoKey, match="not planned: load_in_4bit=true"):
        change_files(job, [], ["parallel.strategy=fsdp"])
    assert change_files(job, [], ["train.micro_batch_size=1"]).load().config.model.quantize is not None


@pytest.mark.parametrize(
    ("text", "words"), [(AXOLOTL, "adapter: qlora, load_in_4bit: true"), (LLAMA_FACTORY, "quantization_bit: 4")]
)
def test_a_base_in_4_bits_is_advised_in_the_recipes_words(text: str, words: str, tmp_path: Path) -> None:
    changed = change_files(recipe(tmp_path, text), [], ["model.quantize.bits=4"])
    quantize = changed.load().config.model.quantize
    assert changed.text == words and quantize is not None and (quantize.bits, quantize.double) == (4, True)
    with pytest.raises(NoKey, match=r"no key of .* means model\.quantize\.bits=4"):
        change_files(recipe(tmp_path, text, deepspeed=ZERO3), [], ["model.quantize.bits=4"])


def test_kernels_that_axolotl_turns_on_by_itself_are_named(tmp_path: Path) -> None:
    def named(**more: Any) -> bool:
        return any("lora_*_kernel" in difference.text for difference in recipe(tmp_path, AXOLOTL, **more).left_out)

    assert named() and named(**QLORA)
    assert not named(lora_mlp_kernel=False) and not named(trust_remote_code=True) and not named(adapter=None)


def test_an_empty_name_below_a_known_key_is_known(tmp_path: Path) -> None:
    job = recipe(tmp_path, AXOLOTL, device_map={"": 0})
    assert "unknown" not in fates(job).values()


@pytest.mark.parametrize(
    ("text", "more", "key", "verb"),
    [
        (AXOLOTL, {"micro_batch_sise": 2}, "micro_batch_sise", "ignores it"),
        (AXOLOTL, {"rope_scaling": {"type": "yarn"}}, "rope_scaling.type", "ignores it"),
        (LLAMA_FACTORY, {"plot_los": True}, "plot_los", "refuses it"),
        (TRL, {"lora_rang": 4}, "lora_rang", "refuses it"),
    ],
)
def test_a_typo_is_unknown_to_its_tool(text: str, more: dict[str, Any], key: str, verb: str, tmp_path: Path) -> None:
    job = recipe(tmp_path, text, **more)
    (said,) = (said for said in job.file_keys if said.fate == "unknown")
    fault = unknown_key(said.tool, said.key)
    assert said.key == key and fault.startswith("unknown to ") and verb in fault


def test_a_typo_has_the_nearest_key(tmp_path: Path) -> None:
    for text, typo, meant in (
        (AXOLOTL, "micro_batch_sise", "micro_batch_size"),
        (AXOLOTL, "num_train_epochs", "num_epochs"),
        (LLAMA_FACTORY, "lora_r", "lora_rank"),
        (LLAMA_FACTORY, "cutof_len", "cutoff_len"),
        (TRL, "max_lenght", "max_length"),
    ):
        (said,) = (said for said in recipe(tmp_path, text, **{typo: 2}).file_keys if said.fate == "unknown")
        assert (said.key, said.note) == (typo, meant)


def test_a_removed_key_is_said_to_be_removed() -> None:
    assert all(find("axolotl", key) is None for key in AXOLOTL_REMOVED)
    assert "removed from axolotl" in unknown_key("axolotl", "max_packed_sequence_len")


def test_full_fine_tuning_has_the_type_that_each_tool_trains(tmp_path: Path) -> None:
    """axolotl trains bf16 weights as they are, LLaMA-Factory makes them fp32, TRL loads fp32 unless `dtype` is set."""
    model = {**MODEL, "dtype": "bfloat16"}
    modes = {
        "axolotl": recipe(tmp_path, AXOLOTL, adapter=None, model=model),
        "llamafactory": recipe(tmp_path, LLAMA_FACTORY, finetuning_type="full", model=model),
        "pure": recipe(tmp_path, LLAMA_FACTORY, finetuning_type="full", pure_bf16=True, model=model),
        "trl": recipe(tmp_path, TRL, use_peft=False, dtype=None, model=model),
        "trl bf16": recipe(tmp_path, TRL, use_peft=False, model=model),
        "fp16": recipe(tmp_path, AXOLOTL, adapter=None, fp16=True, model=model),
        "fp32": recipe(tmp_path, AXOLOTL, adapter=None, bf16=False, model=model),
    }
    assert {name: job.load().config.precision.mode for name, job in modes.items()} == {
        "axolotl": "pure_bf16", "llamafactory": "bf16", "pure": "pure_bf16", "trl": "bf16", "trl bf16": "pure_bf16",
        "fp16": "fp16", "fp32": "fp32",
    }  # fmt: skip
    assert all(job.load().config.adapter.type == "none" for job in modes.values())


def test_an_adapter_that_the_command_line_turns_on_has_the_files_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (file,) = write(tmp_path, recipe__yaml=TRL.replace("use_peft: true\n", ""))
    assert read_job([file], str(tmp_path), 2).load().config.adapter.type == "none"
    settings = ["adapter.type=lora"]
    job = read_job([file], str(tmp_path), 2, overrides=settings)
    assert job.settings["adapter.r"] == 32, "the mapping shows it as planned"
    config = job.load(settings).config
    assert (config.adapter.type, config.adapter.r, config.adapter.targets) == ("lora", 32, ["q_proj"])
    assert job.loop["frozen"] == "bfloat16"


def test_engines_of_a_recipe_are_those_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    zero = recipe(tmp_path, AXOLOTL, deepspeed="zero3.json")
    config = zero.load().config
    assert (config.parallel.strategy, config.train.micro_batch_size) == ("zero3", 2)
    assert config.parallel.ds_config["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    inner = recipe(tmp_path, LLAMA_FACTORY, deepspeed={**ZERO3, "zero_optimization": {"stage": 2}}).load().config
    assert inner.parallel.strategy == "zero2"
    for more in (
        {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"}},
        {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
    ):
        sharded = recipe(tmp_path, AXOLOTL, adapter=None, **more)
        assert "unknown" not in fates(sharded).values() and sharded.problems == ()
        config = sharded.load().config
        assert (config.parallel.strategy, config.precision.mode, config.parallel.reshard_after_forward) == (
            "fsdp", "bf16", True,
        )  # fmt: skip


def test_a_recipe_that_trains_nothing_or_names_no_layers_is_refused(tmp_path: Path) -> None:
    for text, more, cause in (
        (LLAMA_FACTORY, {"do_train": None}, "trains nothing"),
        (AXOLOTL, {"lora_target_modules": None}, "which layers have adapters"),
        (AXOLOTL, {"lora_r": None}, "has no lora_r"),
        (TRL, {"lora_target_modules": None}, "which layers have adapters"),
    ):
        with pytest.raises(ConfigError, match=cause):
            recipe(tmp_path, text, **more).load()
    with pytest.raises(ConfigError, match="second trainer"):
        recipe(tmp_path, "model: x\ntrain_dataset: y\ndist_config: {name: fsdp2}\ncutoff_len: 4\n")
    assert recipe(tmp_path, AXOLOTL, lora_target_linear=True).settings["adapter.targets"] == "all-linear"


def test_a_recipe_beside_a_trainers_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="axolotl and transformers' Trainer"):
        recipe(tmp_path, AXOLOTL, files={"args__yaml": TRAINER})


@pytest.mark.parametrize("tool", RECIPES)
def test_every_key_of_a_recipe_ends_somewhere_without_a_traceback(tool: str, tmp_path: Path) -> None:
    base = yaml.safe_load({"axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "trl": TRL}[tool])
    plain = [key for key in KEYS[tool] if "." not in key and key not in ("deepspeed", *base)]
    sections = {key.removesuffix(".*") for key in KEYS[tool] if key.endswith(".*") and key.count(".") == 1}
    for value in (True, "text", 7, 0.5, [], ["a"], "1e-3", "auto"):
        job = read_job([{**base, **dict.fromkeys(plain, value), **{name: {"other": 1} for name in sections}}])
        assert job.files[0].tool == tool and "unknown" not in fates(job).values()
        for key in base:
            if key not in ("base_model", "model_name_or_path"):
                try:
                    assert read_job([{**base, key: value}]).files[0].tool == tool
                except ConfigError:
                    continue


def test_no_key_stands_in_two_groups() -> None:
    """A key that is listed twice would end where the later group puts it."""
    import ast

    import shardkit.foreign as package

    for name in ("axolotl", "llamafactory", "trl"):
        tree = ast.parse((Path(package.__path__[0]) / f"{name}.py").read_text())
        words: list[str] = []
        for call in ast.walk(tree):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in ("absent", "unplanned")
            ):
                first = call.args if call.func.id == "absent" else call.args[1:]
                words += [word for arg in first for word in ast.literal_eval(arg).split()]
        twice = sorted({word for word in words if words.count(word) > 1})
        assert twice == [], name
