"""Files of other tools become a config here: key by key, `auto` filled in, contradictions refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigError, NotPlannedError
from shardkit.foreign.transfers import Sizes
from shardkit.foreign.translate import ForeignJob, read_job

from .samples import DDP, DUMMIES, FSDP1, FSDP2, MODEL, TRAINER, ZERO2, ZERO3, fates, write

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["v_proj", "q_proj"],
        "bias": "none", "use_dora": False, "rank_pattern": {}, "inference_mode": True}  # fmt: skip
ARGUMENTS = TRAINER + "per_device_train_batch_size: 3\nmax_grad_norm: 0.5\n"
OPEN = ["train.seq_len=64", "train.micro_batch_size=2"]


def job(
    folder: Path, gpus: int | None = None, model: dict[str, Any] = MODEL, adapter: Any = None, **files: Any
) -> ForeignJob:
    (folder / "config.json").write_text(json.dumps(model))
    (peft,) = [None] if adapter is None else write(folder, adapter_config__json=adapter)
    return read_job(write(folder, **files), str(folder), gpus, peft)


def with_lora(**changes: Any) -> dict[str, Any]:
    return {"args__yaml": TRAINER, "adapter": {**LORA, **changes}}


def test_auto_becomes_the_other_files_value(tmp_path: Path) -> None:
    found = job(tmp_path, 8, ds__json=ZERO3, args__yaml=ARGUMENTS)
    config = found.load(OPEN[:1]).config
    assert (config.train.micro_batch_size, config.train.max_norm) == (3, 0.5)
    assert (config.precision.mode, config.parallel.strategy) == ("bf16", "zero3")
    zero = config.parallel.ds_config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert zero["stage3_param_persistence_threshold"] == 640
    sources = {said.key: said.note for said in found.file_keys if said.fate == "auto"}
    assert sources["train_micro_batch_size_per_gpu"].endswith("args.yaml: per_device_train_batch_size")
    assert "default: gradient_accumulation_steps" in sources["gradient_accumulation_steps"]


def test_auto_is_filled_in_as_transformers_does(tmp_path: Path) -> None:
    deepspeed = pytest.importorskip("transformers.integrations.deepspeed")
    found = job(tmp_path, 1, ds__json=ZERO3, args__yaml=ARGUMENTS)
    theirs = deepspeed.HfTrainerDeepSpeedConfig(json.loads(json.dumps(ZERO3)))

    class Arguments:
        world_size, per_device_train_batch_size, gradient_accumulation_steps, max_grad_norm = 1, 3, 1, 0.5
        learning_rate, adam_beta1, adam_beta2, adam_epsilon, weight_decay = 2e-5, 0.9, 0.999, 1e-8, 0.0
        fp16, fp16_full_eval, bf16, bf16_full_eval, save_on_each_node = False, False, True, False, False

        def get_warmup_steps(self, steps: int) -> int:
            return 0

    class Model:
        config = type("Config", (), {"hidden_size": 64})

    theirs.trainer_config_process(Arguments())
    theirs.trainer_config_finalize(Arguments(), Model(), 10)
    config = found.load(OPEN[:1]).config
    assert theirs.config["train_micro_batch_size_per_gpu"] == config.train.micro_batch_size
    assert theirs.config["gradient_accumulation_steps"] == config.train.grad_accum_steps
    assert theirs.config["gradient_clipping"] == config.train.max_norm
    assert theirs.config["bf16"]["enabled"] is (config.precision.mode == "bf16")
    ours = config.parallel.ds_config["zero_optimization"]
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        assert theirs.config["zero_optimization"][key] == ours[key], key


@pytest.mark.parametrize(
    ("text", "strategy", "precision", "gpus"),
    [
        (FSDP2, "fsdp", "bf16", 16),
        (FSDP1, "hsdp", "bf16", 16),
        (ZERO2, "zero2", "bf16", 8),
        (ZERO2.replace("zero_stage: 2", "zero_stage: 1"), "zero1", "bf16", 8),
        (DDP, "ddp", "fp32", 2),
        (DDP.replace("'no'", "fp16"), "ddp", "fp16", 2),
        ("distributed_type: 'NO'\nmixed_precision: bf16\n", "single", "bf16", 1),
    ],
)
def test_accelerates_file_names_the_engine(text: str, strategy: str, precision: str, gpus: int, tmp_path: Path) -> None:
    found = job(tmp_path, accelerate__yaml=text)
    config = found.load(OPEN).config
    assert (config.parallel.strategy, config.precision.mode, found.gpus) == (strategy, precision, gpus)
    assert config.model.loss_chunk_size == 0, "transformers computes whole logits"


def test_accelerates_fsdp_computes_as_accelerate_does(tmp_path: Path) -> None:
    config = job(tmp_path, accelerate__yaml=FSDP2.replace("forward: true", "forward: false")).load(OPEN).config
    assert (config.precision.reduce_dtype, config.precision.autocast) == ("bf16", False)
    assert config.parallel.reshard_after_forward is False
    older = job(tmp_path, accelerate__yaml=FSDP1)
    assert older.load(OPEN).config.precision.autocast, "FSDP1's forward runs under autocast too"
    assert older.loop == {"bucket_views": False, "keeps_cache": True}
    assert job(tmp_path, accelerate__yaml=FSDP2).loop == {"bucket_views": False, "keeps_cache": True, "tail_unit": True}


def test_a_loop_of_ones_own_has_torchs_adamw_and_the_models_cache(tmp_path: Path) -> None:
    found = job(tmp_path, 2, accelerate__yaml=DDP)
    assert found.load(OPEN).config.optim.implementation == "foreach", "no file of Accelerate names an optimizer"
    assert found.load([*OPEN, "run.device=cpu"]).config.optim.implementation == "for_loop"
    assert found.loop["keeps_cache"]
    assert not job(tmp_path, 2, model={**MODEL, "use_cache": False}, accelerate__yaml=DDP).loop["keeps_cache"]
    assert "keeps_cache" not in job(tmp_path, 2, args__yaml=ARGUMENTS).loop, "the Trainer turns it off"


@pytest.mark.parametrize(("stage", "half", "fp32"), [(3, True, True), (3, False, False), (2, True, False)])
def test_zero3_leaves_adapters_in_fp32_that_are_made_after_the_sharding(
    stage: int, half: bool, fp32: bool, tmp_path: Path
) -> None:
    deepspeed = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": half},
                 "zero_optimization": {"stage": stage}}  # fmt: skip
    given = TRAINER if half else TRAINER.replace("bf16: true\n", "")
    found = job(tmp_path, 2, adapter=LORA, ds__json=deepspeed, args__yaml=given + "per_device_train_batch_size: 2\n")
    assert found.loop.get("fp32_adapters", False) is fp32
    assert any(key == "adapters" for key, _, _ in found.added) is fp32


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        ("fsdp: true\n", "parallel.strategy", "fsdp"),
        ("fsdp: full_shard auto_wrap offload\n", "parallel.offload_param", "cpu"),
        ("fsdp: true\nfsdp_config: {fsdp_reshard_after_forward: false}\n", "parallel.reshard_after_forward", False),
        ("fsdp: true\nfsdp_config: {activation_checkpointing: true}\n", "activation.policy", "full"),
        ("gradient_checkpointing: true\n", "activation.policy", "full"),
        ("optim: adafactor\n", "optim.name", "adafactor"),
        ("optim: adamw_torch\n", "optim.implementation", "foreach"),
        ("max_grad_norm: 0\n", "train.max_norm", None),
        ("torch_compile: true\n", "compile.enabled", True),
        ("ddp_bucket_cap_mb: 50\n", "parallel.bucket_mb", 50),
        ("use_cpu: true\n", "run.device", "cpu"),
        ("max_length: 96\n", "train.seq_len", 96),
        ("lr_scheduler_type: constant_with_warmup\nwarmup_steps: 5\n", "optim.warmup_steps", 5),
    ],
)
def test_a_training_argument_has_its_key_here(more: str, key: str, value: Any, tmp_path: Path) -> None:
    text = "\n".join(line for line in TRAINER.splitlines() if not more.startswith(line.partition(":")[0])) + "\n"
    found = job(tmp_path, 2, args__yaml=text + more)
    config = found.load([] if "max_length" in more else OPEN[:1]).config
    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == value
    assert config.optim.betas == (0.9, 0.999) or config.optim.name == "adafactor"


def test_every_key_ends_in_one_place(tmp_path: Path) -> None:
    deepspeed = {**ZERO3, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}, "typo": 1}
    found = job(
        tmp_path, 2, ds__json=deepspeed, args__yaml=TRAINER + "report_to: none\nper_device_eval_batch_size: 4\n"
    )
    ends = fates(found)
    assert len(found.file_keys) == len({(said.file, said.key) for said in found.file_keys})
    assert ends["zero_optimization.stage"] == "mapped"
    assert ends["zero_optimization.stage3_max_live_parameters"] == "ignored"
    assert ends["gradient_clipping"] == "auto"
    assert ends["report_to"] == ends["per_device_eval_batch_size"] == "absent"
    assert ends["typo"] == "unknown"
    assert ends["max_grad_norm"] == "default"


def test_a_value_that_the_trainer_compares_with_its_default_has_to_be_equal(tmp_path: Path) -> None:
    deepspeed = {**ZERO3, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=4 contradicts the Trainer's default"):
        job(tmp_path, 2, ds__json=deepspeed, args__yaml=TRAINER).load(OPEN[:1])
    same = job(tmp_path, 2, ds__json=deepspeed, args__yaml=TRAINER + "gradient_accumulation_steps: 4\n")
    assert same.load(OPEN[:1]).config.train.grad_accum_steps == 4


def test_a_contradiction_names_both_values_and_the_command_line_settles_it(tmp_path: Path) -> None:
    found = job(tmp_path, accelerate__yaml=ZERO2, args__yaml=TRAINER + "gradient_accumulation_steps: 2\n")
    with pytest.raises(ConfigError) as caught:
        found.load(OPEN)
    assert "gradient_accumulation_steps=4" in caught.value.cause
    assert "gradient_accumulation_steps=2" in caught.value.cause
    assert found.load([*OPEN, "train.grad_accum_steps=2"]).config.train.grad_accum_steps == 2


@pytest.mark.parametrize(
    ("files", "cause", "fix"),
    [
        ({"ds__json": ZERO3}, 'gradient_accumulation_steps="auto", but no', "train.grad_accum_steps=1"),
        ({"ds__json": ZERO3}, 'bf16.enabled="auto", but no other file', "precision.mode=bf16"),
        ({"args__yaml": TRAINER + "optim: lion_32bit\n"}, "optim='lion_32bit' has no counterpart", "optim.name"),
        ({"args__yaml": TRAINER}, "how many tokens", "train.seq_len=2048"),
        ({"accelerate__yaml": DDP}, "how many samples", "train.micro_batch_size=4"),
        ({"args__yaml": TRAINER + "deepspeed: gone.json\n"}, "does not exist", "path"),
        ({"args__yaml": TRAINER + "fsdp: true\n", "ds__json": ZERO3}, "FSDP and for DeepSpeed", "remove"),
        ({"accelerate__yaml": DDP.replace("MULTI_GPU", "MEGATRON_LM")}, "MEGATRON_LM", "parallel.strategy"),
        ({"args__yaml": TRAINER, "ds__json": {**ZERO3, "zero_optimization": {"stage": 0}}}, "stage is 0", "stage 1"),
        (with_lora(peft_type="IA3"), "peft_type='IA3' has no counterpart", "adapter.type"),
        (with_lora(use_dora=True), "use_dora=true cannot be planned: it adds memory", "remove the key"),
        (with_lora(rank_pattern={"q_proj": 2}), "layers of different ranks", "remove the key"),
        (with_lora(modules_to_save=["lm_head"]), "whole modules are trained too", "remove the key"),
        (with_lora(target_modules=None), "no file says which layers have adapters", "adapter.targets"),
        (with_lora(r="four"), "it is not a whole number", "adapter.r"),
        ({"args__yaml": TRAINER, "adapter": '{"r": 8, '}, "ends early", "adapter_config.json"),
        ({"args__yaml": TRAINER, "adapter": {"learning_rate": 1}}, "it has no peft_type", "adapter_config.json"),
        ({"args__yaml": TRAINER, "adapter": ""}, "is empty", "adapter_config.json"),
    ],
)
def test_open_points_are_refused(files: dict[str, Any], cause: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        job(tmp_path, 2, **files).load()
    assert cause in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({}, "has no config.json"),
        ({"config.json": "{"}, "cannot be read"),
        ({"config.json": '{"a": 1}'}, "no model_type"),
    ],
)
def test_a_folder_without_a_models_config_is_refused(files: dict[str, str], cause: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_job(write(tmp_path, args__yaml=TRAINER), str(folder))
    assert cause in caught.value.cause
    assert caught.value.fix


def test_code_in_a_models_folder_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "modeling_mine.py").write_text(f"open({str(ran)!r}, 'w')\n")
    model = {**MODEL, "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    found = job(tmp_path, model=model, args__yaml=TRAINER)
    found.load(OPEN[:1])
    assert any("never run" in one.text for one in found.left_out)
    assert not ran.exists()


def test_a_checkpoint_in_bf16_stays_bf16_where_their_tool_leaves_it_so(tmp_path: Path) -> None:
    stored = {**MODEL, "dtype": "bfloat16"}
    for text, mode in ((DDP.replace("'no'", "bf16"), "pure_bf16"), (FSDP2, "bf16"), (ZERO2, "bf16")):
        assert job(tmp_path, model=stored, accelerate__yaml=text).load(OPEN).config.precision.mode == mode


def test_differences_that_a_plan_does_not_have_are_said_with_their_bytes(tmp_path: Path) -> None:
    found = job(tmp_path, 2, args__yaml=TRAINER)
    config = found.load(OPEN).config
    assert [one.amount(config) for one in found.left_out] == [4 * 256 * 2 * 64], "logits of a micro-batch in fp32"


def test_a_sharded_plan_of_one_rank_that_no_file_asked_for_is_told(tmp_path: Path) -> None:
    def texts(n_ranks: int | None, **files: str) -> str:
        return " ".join(difference.text for difference in job(tmp_path, n_ranks, **files).left_out)

    without_ranks = FSDP2.replace("num_processes", "main_process_port")
    assert "no file says how many" in texts(None, accelerate__yaml=without_ranks)
    assert "no file says how many" in texts(None, ds__json=ZERO3, args__yaml=TRAINER)
    assert "no file says how many" not in texts(4, accelerate__yaml=without_ranks)
    assert "no file says how many" not in texts(None, accelerate__yaml=FSDP2)
    assert "no file says how many" not in texts(None, args__yaml=TRAINER), "nothing is sharded"


SIZES = Sizes(params=1000, largest=100, largest_block=200, shards=4)


def moments(found: ForeignJob) -> dict[tuple[str, str, bool], tuple[int, int, int]]:
    """(phase, ranks, expected) → bytes on the device, on the host, mapped."""
    return {
        (one.phase, one.ranks, one.expected): (one.on_device(SIZES, 7), one.on_host(SIZES), one.in_file(SIZES))
        for one in found.transfers
    }


def test_loading_and_saving_have_rows_of_their_own(tmp_path: Path) -> None:
    fp32, half = TRAINER.replace("bf16: true", "bf16: false"), {**MODEL, "dtype": "bfloat16"}
    full = {**ZERO3, "zero_optimization": {**ZERO3["zero_optimization"]}}
    assert moments(job(tmp_path, 4, args__yaml=fp32)) == {
        ("loading", "every rank", True): (4000, 0, 4000), ("saving", "rank 0", True): (0, 4000, 0)
    }  # fmt: skip
    zero3 = moments(job(tmp_path, 4, ds__json=full, args__yaml=TRAINER))
    assert zero3 == {
        ("loading", "every rank", True): (2 * 250 + 2 * 100, 2 * 250, 0),
        ("loading", "rank 0", True): (0, 0, 4000),
        ("loading", "every rank", False): (2000, 2000, 4000),
        ("saving", "every rank", True): (2 * 100 + 7, 0, 0),
        ("saving", "rank 0", True): (0, 2000, 0),
    }
    late = moments(job(tmp_path, accelerate__yaml=ZERO2.replace("zero_stage: 2", "zero_stage: 3")))
    assert late["loading", "every rank", True][0] == 2000, "zero3_init_flag is off: the whole model is moved first"
    sharded = moments(job(tmp_path, 4, model=half, args__yaml=TRAINER + "fsdp: true\n"))
    assert sharded["loading", "every rank", True] == (4 * 250 + 4 * 200, 4000, 2000), "fp32 copies of a bf16 file"
    assert sharded["saving", "rank 0", True][1] == 8000, "FULL_STATE_DICT is the Trainer's default"
    pieces = job(tmp_path, 4, args__yaml=TRAINER + "fsdp: true\nfsdp_config: {state_dict_type: SHARDED_STATE_DICT}\n")
    assert {phase for phase, *_ in moments(pieces)} == {"loading"}


def test_fsdp_on_cpus_is_planned_as_ddp(tmp_path: Path) -> None:
    for files in (
        {"args__yaml": TRAINER + "use_cpu: true\nfsdp: true\nfsdp_config: {reshard_after_forward: false}\n"},
        {"accelerate__yaml": FSDP2 + "use_cpu: true\n"},
    ):
        found = job(tmp_path, 2, **files)
        assert found.load(OPEN).config.parallel.strategy == "ddp"
        assert any("trains with DDP" in said.note for said in found.file_keys if said.fate == "ignored")


def test_a_file_that_another_names_is_read_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(ZERO3))
    found = job(folder, 2, args__yaml=TRAINER + "deepspeed: ds.json\n")
    assert found.load(OPEN[:1]).config.parallel.strategy == "zero3"


@pytest.mark.parametrize(("files", "imported"), [({}, []), ({"accelerate__yaml": DDP}, ["accelerate", "torch"])])
def test_reading_imports_accelerate_for_its_own_files_alone(
    files: dict[str, str], imported: list[str], tmp_path: Path
) -> None:
    names = write(tmp_path, ds__json=ZERO3, args__yaml=TRAINER, **files)
    code = (
        "import sys; from shardkit.foreign.translate import read_job; read_job(sys.argv[1:]);"
        "print(sorted({'accelerate', 'deepspeed', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(imported)
    assert not done.stderr


def test_an_adapters_file_becomes_the_adapter_section(tmp_path: Path) -> None:
    found = job(tmp_path, 2, **with_lora())
    adapter = found.load(OPEN[:1]).config.adapter
    assert (adapter.type, adapter.r, adapter.alpha, adapter.dropout) == ("lora", 4, 16, 0.1)
    assert adapter.targets == ["q_proj", "v_proj"]
    ends = fates(found)
    assert (ends["target_modules"], ends["inference_mode"]) == ("mapped", "absent")
    assert read_job(write(tmp_path, args__yaml=TRAINER), str(tmp_path), 2, str(tmp_path)).settings["adapter.r"] == 4


@pytest.mark.parametrize(
    ("half", "said", "header", "frozen"),
    [
        ("bf16: true", {}, None, "float32"),
        ("bf16: true", {"dtype": "bfloat16"}, None, "bfloat16"),
        ("bf16: true", {"torch_dtype": "float32"}, "BF16", "float32"),
        ("bf16: true", {}, "BF16", "bfloat16"),
        ("bf16: true", {}, "F32", "float32"),
        ("bf16: false", {"dtype": "bfloat16"}, None, "bfloat16"),
    ],
)
def test_the_frozen_model_keeps_the_type_of_its_files(
    half: str, said: dict[str, str], header: str | None, frozen: str, tmp_path: Path
) -> None:
    job(tmp_path, 2, **with_lora())
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **said}))
    if header is not None:
        text = json.dumps({"__metadata__": {"format": "pt"}, "ids": {"dtype": "I64"}, "w": {"dtype": header}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (args,) = write(tmp_path, args__yaml=TRAINER.replace("bf16: true", half))
    found = read_job([args], str(tmp_path), 1, str(tmp_path))
    assert found.loop["frozen"] == frozen
    told = [one for one in found.added if one[0] == "frozen weights"]
    here = "bfloat16" if found.load(OPEN[:1]).config.precision.mode == "bf16" else "float32"
    assert [one[1] for one in told] == ([] if frozen == here else [frozen])
    zero = read_job([args, *write(tmp_path, ds__json=ZERO3)], str(tmp_path), 2, str(tmp_path))
    assert "frozen" not in zero.loop, "DeepSpeed casts all weights"


def test_weights_that_are_cut_off_are_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "model.safetensors").write_bytes((10**12).to_bytes(8, "little"))
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: its header is too long"):
        read_job(write(tmp_path, args__yaml=TRAINER), str(tmp_path), 1)


def test_a_job_that_accelerate_leaves_on_cpus_is_not_taken_for_deepspeeds(tmp_path: Path) -> None:
    files = {"args__yaml": TRAINER, "ds__json": ZERO3}
    found = job(tmp_path, 2, accelerate__yaml="distributed_type: MULTI_CPU\nuse_cpu: true\n", **files)
    with pytest.raises(ConfigError, match="Accelerate then leaves DeepSpeed out, and trains with DDP"):
        found.load(OPEN[:1])
    names = [str(tmp_path / name) for name in ("accelerate.yaml", "args.yaml", "ds.json")]
    (fault,) = (one for one in read_job(names).problems if "leaves DeepSpeed out" in one.cause)
    assert "set it in the Trainer's" in fault.fix
    own = {**files, "args__yaml": TRAINER + "use_cpu: true\n"}
    found = job(tmp_path, 2, accelerate__yaml="distributed_type: MULTI_CPU\nuse_cpu: false\n", **own)
    assert found.load(OPEN[:1]).config.parallel.strategy == "zero3"


def test_the_optimizers_groups_are_those_of_who_makes_it(tmp_path: Path) -> None:
    trainers = job(tmp_path, 2, args__yaml=TRAINER, ds__json=ZERO3)
    assert trainers.loop["embeddings_decay"]
    assert not trainers.load(OPEN[:1]).config.optim.decay_norm_bias_embed
    for files in ({"ds__json": DUMMIES, "args__yaml": TRAINER}, {"accelerate__yaml": ZERO2}):
        other = job(tmp_path, 8, **files)
        assert "embeddings_decay" not in other.loop
        assert other.load(OPEN).config.optim.decay_norm_bias_embed, "one group of model.parameters()"


def test_contents_and_objects_are_read_as_files_are(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    arguments = transformers.TrainingArguments(
        "out", per_device_train_batch_size=3, bf16=True, max_grad_norm=0.5, gradient_checkpointing=True, use_cpu=True
    )
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    deepspeed = {**ZERO3, "zero_optimization": {"stage": 2}}
    found = read_job([arguments, deepspeed, adapter], tmp_path, 2)
    texts = {"output_dir": "out", "per_device_train_batch_size": 3, "bf16": True, "max_grad_norm": 0.5,
             "gradient_checkpointing": True, "use_cpu": True}  # fmt: skip
    lora = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    files = write(tmp_path, args__json=texts, ds__json=deepspeed, lora__json=lora)
    assert found.settings == read_job(files[:2], str(tmp_path), 2, files[2]).settings
    assert found.name == "TrainingArguments + dict of DeepSpeed + LoraConfig"
    assert {said.fate for said in found.file_keys} == {"mapped", "default", "auto", "absent"}
    assert read_job([texts, files[1]], tmp_path, 2).settings["train.micro_batch_size"] == 3


@pytest.mark.parametrize(
    ("files", "not_planned"),
    [
        ({"accelerate__yaml": DDP
          + "parallelism_config: {parallelism_config_cp_size: 2, parallelism_config_tp_size: 1}\n"},
         {"parallelism_config.parallelism_config_cp_size": 2}),
        ({"ds__json": {**ZERO3, "tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 1}},
                       "sequence_parallel_size": 2}},
         {"tensor_parallel.autotp_size": 4, "sequence_parallel_size": 2}),
        ({"ds__json": {**ZERO3, "zero_optimization": {**ZERO3["zero_optimization"], "zero_quantized_weights": True}}},
         {"zero_optimization.zero_quantized_weights": True}),
        ({"args__yaml": TRAINER + "ep_size: 8\nsp_size: 2\nquantization_bit: 8\nuse_liger_kernel: true\n"},
         {"ep_size": 8, "sp_size": 2, "quantization_bit": 8, "use_liger_kernel": True}),
        ({"args__json": {"output_dir": "o", "model_init_kwargs": {"quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}}},
         {"model_init_kwargs.quantization_config.load_in_4bit": True}),
        ({"args__json": {"output_dir": "o", "quantization_config": {"quant_method": "gptq"}}},
         {"quantization_config.quant_method": "gptq"}),
        ({"args__yaml": TRAINER + "load_in_4bit: 1\nuse_liger_kernel: '1'\ntp_size: 1\n",
          "ds__json": {**ZERO3, "zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}},
         {"load_in_4bit": 1, "use_liger_kernel": "1", "zero_optimization.zenflow.topk_ratio": 0.1}),
        ({"args__yaml": TRAINER + "load_in_4bit: false\nload_in_8bit: null\ntp_size: 1\ncp_size: '1'\n"
          "quantization_bit: null\nuse_liger_kernel: false\nparallelism_config: {cp_size: 1, cp_backend: torch}\n",
          "ds__json": {**ZERO3, "sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 0},
                       "hybrid_engine": {"enabled": False, "max_out_tokens": 512}}}, {}),
    ],
)  # fmt: skip
def test_keys_that_change_memory_and_are_not_planned_are_named(
    files: dict[str, Any], not_planned: dict[str, Any], tmp_path: Path
) -> None:
    found = job(tmp_path, 2, **files)
    assert {said.key: said.value for said in found.file_keys if said.fate == "unplanned"} == not_planned
    assert len(found.not_planned) == len(not_planned)
    if not_planned:
        with pytest.raises(NotPlannedError, match="remove the key"):
            found.refuse_unplanned()
    else:
        found.refuse_unplanned()


def test_parallelism_in_an_object_of_training_arguments_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for size in (1, 2):
        parallel = accelerate.ParallelismConfig(tp_size=size, dp_shard_size=2)
        arguments = transformers.TrainingArguments("out", use_cpu=True, parallelism_config=parallel)
        found = read_job([arguments], tmp_path, 2)
        assert [line.partition(" in ")[0] for line in found.not_planned] == [
            "not planned: parallelism_config.tp_size=2"
        ][: size - 1]


@pytest.mark.parametrize("wrong", [3, {}, {"nonsense": 1}, None, ["a"]])
def test_an_object_that_is_no_config_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        read_job([wrong])


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("ds.json", '{"zero_optimization": {\n"stage": 2,\n"reduce_bucket_size": NaN}}', r"ds.json:3: .*size is nan"),
        ("args.json", '{"output_dir": "o",\n"per_device_train_batch_size": Infinity}', r"args.json:2: .*size is inf"),
        ("args.json", '{"output_dir": "o", "adam_beta1": 1e999}', r"args.json:1: adam_beta1 is inf"),
        ("acc.yaml", "distributed_type: MULTI_GPU\nnum_processes: .nan\n", r"acc.yaml:2: num_processes is nan"),
    ],
)
def test_numbers_that_are_not_finite_are_named_by_line(name: str, text: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=cause) as caught:
        read_job([str(tmp_path / name)])
    assert "\n" not in caught.value.cause
