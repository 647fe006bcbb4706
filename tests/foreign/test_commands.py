"""`shardkit plan --from`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.cli.submit_plan import only_for_accelerates_launcher
from shardkit.config import capability
from shardkit.config.libraries import installed
from shardkit.config.load import load_config
from shardkit.foreign.show import left_out, mapping, misfits, moments, save
from shardkit.foreign.translate import read_job
from shardkit.plan.client import plan
from shardkit.plan.model.estimate import MemoryEstimate, PeakEstimate
from shardkit.plan.target import choose_target
from tests.cli.test_main import shardkit
from tests.foreign.samples import DDP, FSDP2, MODEL, TRAINER, ZERO3, write
from tests.foreign.test_recipes import AXOLOTL


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A Trainer's file, its DeepSpeed file and a model's folder."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    deepspeed = {**ZERO3, "zero_optimization": {**ZERO3["zero_optimization"], "offload_optimizer": {"device": "none"}}}
    text = TRAINER + "per_device_train_batch_size: 2\nuse_cpu: true\n"
    return write(tmp_path, args__yaml=text, ds__json=deepspeed)


@pytest.mark.slow
def test_a_plan_from_files_says_every_key_and_is_that_of_the_same_config_here(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", tmp_path, "--gpus", 2, "train.seq_len=64")
    assert shardkit("plan", "--from", files[0], files[1], *model) == 0
    out = capsys.readouterr().out
    for said in ("per_device_train_batch_size: 2", "→ train.micro_batch_size=2", "→ parallel.strategy=zero3"):
        assert said in out
    assert "args.yaml + ds.json: zero3 on 2 × cpu" in out
    assert "model.loss_chunk_size=0" in out.partition("set because their loop differs")[2]
    rows = out.partition("beside the steps")[2].splitlines()
    assert [row.split()[0] for row in rows[1:6]] == ["loading", "loading", "(loading)", "saving", "saving"]

    assert shardkit("plan", "--from", files[0], "--from", files[1], *model, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    here = load_config(None, {**found["from"]["settings"], "train.seq_len": 64}).config
    assert found["peak"]["allocated"] == plan(here, choose_target(here, 2), loop={"bucket_views": False}).peak.allocated
    assert {said["fate"] for said in found["from"]["keys"]} >= {"mapped", "default", "auto", "absent"}


@pytest.mark.slow
def test_ranks_come_from_accelerates_file_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (file,) = write(tmp_path, accelerate__yaml=FSDP2.replace("num_processes: 16", "num_processes: 4"))
    given = ("--from", file, "--model", tmp_path, "train.seq_len=64", "train.micro_batch_size=1", "run.device=cpu")
    assert shardkit("plan", *given) == 0
    assert "fsdp on 4 × cpu" in capsys.readouterr().out
    assert read_job([file], str(tmp_path), 2).gpus == 2


@pytest.mark.slow
def test_a_plan_of_a_recipe_names_its_tool_and_what_is_not_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out(tmp_path, {"recipe.yaml": AXOLOTL.replace("some/model", "model")})
    monkeypatch.chdir(tmp_path)
    assert shardkit("plan", "--from", "recipe.yaml", "run.device=cpu") == 0
    out = capsys.readouterr().out
    assert out.startswith("recipe.yaml (axolotl)\n") and "→ adapter.r=16" in out and "unknown" not in out
    laid_out(tmp_path, {"recipe.yaml": AXOLOTL.replace("some/model", "model") + "load_in_4bit: true\nlora_rr: 3\n"})
    assert shardkit("plan", "--from", "recipe.yaml", "run.device=cpu") == 7
    out = capsys.readouterr().out
    assert "verdict    not planned: load_in_4bit=true in recipe.yaml" in out
    assert "which ignores it; did you mean lora_r?" in out


def test_a_search_starts_from_a_config_that_every_engine_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    found = read_job(write(tmp_path, accelerate__yaml=FSDP2, args__yaml=TRAINER), str(tmp_path))
    assert found.settings["precision.reduce_dtype"] == "bf16"
    path = str(save(found, tmp_path / "auto"))
    for strategy in ("ddp", "fsdp", "zero3"):
        config = load_config(path, {"parallel.strategy": strategy, "train.seq_len": 64}).config
        capability.check(config, device="cuda", world_size=2, local_world_size=2)
    assert config.train.micro_batch_size == 8


def test_a_plan_that_fits_only_without_other_copies_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    found = read_job(
        write(tmp_path, accelerate__yaml="distributed_type: MULTI_GPU\nmixed_precision: bf16\n"), str(tmp_path), 2
    )
    config = found.load(["train.seq_len=64", "train.micro_batch_size=1", "run.device=cpu"]).config
    peak = PeakEstimate(1000, 1000, 1000, "backward", "")
    estimate = MemoryEstimate(
        device="cpu", world_size=2, rank=0, n_params=100, n_blocks=1, method="cpu", phases={}, peak=peak, resident=0,
        host_peak=0, categories={}, overhead=0, overhead_from="", uncertainty=0.03,
    )  # fmt: skip
    whole = 1000 + 4 * 256 * 64  # the logits of a micro-batch in fp32
    assert "may not fit" in "\n".join(left_out(found, config, estimate.limited(whole - 1, None)))
    assert "may not fit" not in "\n".join(left_out(found, config, estimate.limited(whole, None)))


ACCELERATES_ZERO2 = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n"
FULL = "fsdp: true\n"


@pytest.mark.parametrize(
    ("given", "phase", "where", "cause", "fix"),
    [
        ({"args__yaml": TRAINER + FULL}, "saving", "host", "FULL_STATE_DICT: the whole model on the host",
         "set fsdp_config.state_dict_type: SHARDED_STATE_DICT"),
        ({"accelerate__yaml": FSDP2.replace("SHARDED_STATE", "FULL_STATE")}, "saving", "host",
         "FULL_STATE_DICT: the whole model on the host", "set fsdp_config.fsdp_state_dict_type: SHARDED_STATE_DICT"),
        ({"args__yaml": TRAINER + FULL}, "loading", "device", "embedding and head stay whole until the end",
         "set fsdp_config.cpu_ram_efficient_loading: true"),
        ({"args__yaml": TRAINER, "ds__json": ZERO3}, "saving", "host",
         "stage3_gather_16bit_weights_on_model_save: the whole model on the host",
         "set zero_optimization.stage3_gather_16bit_weights_on_model_save: false, and convert checkpoints with "
         "zero_to_fp32.py"),
        ({"accelerate__yaml": ACCELERATES_ZERO2}, "saving", "host",
         "get_state_dict clones the whole model on the host of every rank",
         "set deepspeed_config.zero_stage: 3, whose checkpoints hold shards"),
        ({"ds__json": {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}}, "loading", "device",
         "DeepSpeed moves it to the device before it shards", "make the model under deepspeed.zero.Init"),
    ],
    ids=["trainer-full", "accelerate-full", "whole-embedding", "gathered", "cloned", "made-late"],
)  # fmt: skip
def test_loading_or_saving_that_does_not_fit_names_its_cause_and_the_key_to_change(
    given: dict[str, Any], phase: str, where: str, cause: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    found = read_job(write(tmp_path, **given), str(tmp_path), 2)
    config = found.load(["train.seq_len=64", "train.micro_batch_size=1"]).config
    estimate = MemoryEstimate(
        device="a100", world_size=2, rank=0, n_params=100_000, n_blocks=2, method="cuda", phases={},
        peak=PeakEstimate(1000, 1000, 1000, "backward", ""), resident=1000, host_peak=1000, categories={}, overhead=0,
        overhead_from="", uncertainty=0.03, largest=10_000, largest_block=10_000,
    )  # fmt: skip
    beside = moments(found, config, estimate)
    rows = [one for one in beside if one.phase == phase and cause in one.text]
    (row,) = rows
    assert row.fix == fix
    assert list(misfits(beside, estimate.limited(10**9, 10**9), 2)) == []
    little = estimate.limited(10**9, 1001) if where == "host" else estimate.limited(getattr(row, where) - 1, 10**9)
    said = list(misfits(beside, little, 2))
    line = next(index for index, text in enumerate(said) if cause in text)
    assert said[line].startswith(f"{phase} does not fit: ")
    assert said[line + 1] == f"  fix: {fix}"


@pytest.mark.slow
def test_a_job_of_which_nothing_fits_says_each_part_and_exits_with_4(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--from", *files, "--model", tmp_path, "--gpus", 2, "train.seq_len=64", "--no-advice")
    assert shardkit("plan", *given, "--host-memory", "1M") == 4
    out = capsys.readouterr().out
    assert "verdict    does not fit: " in out
    told = [line for line in out.splitlines() if line.startswith(("saving does not fit", "loading does not fit"))]
    assert any("stage3_gather_16bit_weights_on_model_save" in line for line in told)


@pytest.mark.slow
def test_a_key_that_is_not_planned_takes_the_verdicts_place(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan, the search and the ladder end with 7; `submit` queues such a job only with --force."""
    (args,) = write(tmp_path, args__yaml=Path(files[0]).read_text() + "tp_size: 4\nload_in_4bit: true\ncp_size: 1\n")
    given = (
        "--from", args, files[1], "--model", tmp_path, "--gpu-memory", "80GB", "train.seq_len=64", "run.device=cpu",
    )  # fmt: skip
    lines = ["not planned: tp_size=4 in ", "not planned: load_in_4bit=true in "]
    assert shardkit("plan", *given, "--gpus", 2) == 7
    out = capsys.readouterr().out
    verdicts = [line.removeprefix("verdict    ") for line in out.splitlines() if line.startswith("verdict")]
    assert [line.startswith(begin) for line, begin in zip(verdicts, lines, strict=True)] == [True, True], verdicts
    assert "divides each layer's weights" in verdicts[0] and "without    them: fits" in out
    assert "`shardkit rehearse -- COMMAND` runs the program itself" in out
    assert shardkit("plan", *given, "--json") == 7
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["verdict_without"], len(found["from"]["not_planned"])) == ("not planned", "fits", 2)
    for command in (("plan", "--auto", "--out", tmp_path / "auto"), ("ladder", "--out", tmp_path / "ladder")):
        assert shardkit(command[0], *given, *command[1:]) == 7
        err = capsys.readouterr().err
        assert all(line in err for line in lines) and "remove the key from a copy of the file" in err
        assert "with it, shardkit rehearse -- COMMAND" in err
    assert not (tmp_path / "auto").exists() and not (tmp_path / "ladder").exists()
    (tmp_path / "train.py").write_text("pass\n")
    gate = (*GATE, "--from", args, files[1], "--model", tmp_path, "--gpu", "l4", "train.seq_len=64")
    script = ("--run-dir", tmp_path / "run", "--", tmp_path / "train.py")
    assert shardkit(*gate, *script) == 7
    out, err = capsys.readouterr()
    assert all(line in err for line in lines) and "--force" in err and "#SBATCH" not in out
    assert shardkit(*gate, "--force", *script) == 0
    assert "#SBATCH" in capsys.readouterr().out


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
PLAN = ["plan", "--from", "args.yaml", "--model", "model", "--gpus", 2, "run.device=cpu", "train.seq_len=64"]
BAD: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "half-written JSON": ({"ds.json": '{"zero_optimization": {"sta'}, ["plan", "--from", "ds.json"], "ends early"),
    "half-written YAML": ({"args.yaml": TRAINER + "max_st"}, ["plan", "--from", "args.yaml"], "not YAML"),
    "half-written model": ({"model/config.json": '{"model_type": "ll'}, PLAN, "cannot be read"),
    "half-written adapter": ({"lora.json": '{"r": 4, '}, [*PLAN, "--peft", "lora.json"], "ends early"),
    "auto alone": ({"ds.json": {"train_micro_batch_size_per_gpu": "auto"}},
                   ["plan", "--from", "ds.json", *PLAN[3:]], '"auto", but no other file'),
    "a file that another one names": ({"args.yaml": TRAINER + "deepspeed: gone.json\n"}, PLAN, "gone.json names"),
    "no config in the model's folder": ({"model/config.json": None}, PLAN, "has no config.json"),
    "code in the model's folder": (
        {"model/config.json": {"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoModel": "mine.M"}}},
        PLAN, "code in its folder (auto_map) is never run"),
    "a config in the model's folder that only its code reads": (
        {"model/config.json": {"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoConfig": "mine.C"}}},
        [*PLAN, "task.name=hf_causal_lm"], "is not a model of transformers"),
    "a binary file that another one names": (
        {"args.yaml": TRAINER + "fsdp: full_shard\nfsdp_config: fsdp.json\n", "fsdp.json": b"\xff\xfe\x00"}, PLAN,
        "fsdp.json is not UTF-8 text"),
    "an adapter without layers": ({"args.yaml": TRAINER + "use_peft: true\n"}, PLAN, "lora_target_modules: all-linear"),
    "--from forgotten": ({}, ["plan", "args.yaml"], "pass it as --from args.yaml"),
    "another tool's file to launch": (
        {"ds.json": ZERO3}, ["launch", "ds.json"], "ds.json is a file of DeepSpeed, not a config of shardkit"),
    "another tool's file to submit": ({"accelerate.yaml": FSDP2}, ["submit", "accelerate.yaml"], "of Accelerate, not"),
    "a model's file as a config": ({}, ["plan", "model/config.json"], "pass it as --model model/config.json"),
    "an adapter that names no module": ({"lora.json": {**LORA, "target_modules": []}},
                                        [*PLAN, "--peft", "lora.json"], "target_modules=[]"),
    "an adapter that names other modules": ({"lora.json": {**LORA, "target_modules": ["query"]}},
                                            [*PLAN, "--peft", "lora.json"], "query matches no layer"),
}  # fmt: skip
VERSIONS = {
    "args.yaml": (TRAINER + "evaluation_strategy: epoch\n", ["evaluation_strategy", "did you mean eval_strategy?"]),
    "ds.json": ({"zero_optimization": {"stage": 2}, "curriculum_learning": {"enabled": True}},
                ["curriculum_learning", "removed from DeepSpeed"]),
    "accelerate.yaml": (FSDP2.replace("fsdp_version: 2", "fsdp_version: 3"), ["fsdp_version=3 is neither"]),
}  # fmt: skip


def laid_out(folder: Path, files: dict[str, Any]) -> None:
    for name, content in {"args.yaml": TRAINER, "model/config.json": MODEL, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if content is not None:
            text = content if isinstance(content, (str, bytes)) else json.dumps(content)
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_two_lines(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, words, said = BAD[case]
    laid_out(tmp_path, {"model/mine.py": "open('ran', 'w')\n", **files})
    monkeypatch.chdir(tmp_path)
    assert shardkit(*words) == 2
    *progress, cause, fix = capsys.readouterr().err.splitlines()
    assert all(line.startswith("planning ") for line in progress)
    assert cause.startswith("error: ") and fix.startswith("  fix: ") and said in cause + fix
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", VERSIONS)
def test_a_file_of_another_version_of_the_tool_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, words = VERSIONS[name]
    laid_out(tmp_path, {name: content})
    monkeypatch.chdir(tmp_path)
    job = read_job([name])
    lines = [*mapping(job), *(problem.cause for problem in job.problems)]
    assert any(all(word in line for word in words) for line in lines), lines


def test_open_points_are_one_line_each(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert shardkit("plan", "--from", files[1]) == 2
    error = capsys.readouterr().err
    assert 'keys are "auto", but no other file says what they become' in error
    assert "pass --model" in error


GATE = ["submit", "--dry-run", "--gpus-per-node", 2]
SCRIPT = ["--", "train.py", "--epochs", 3]


@pytest.mark.slow
def test_a_script_whose_files_do_not_fit_is_refused_in_their_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    big = TRAINER + "per_device_train_batch_size: 512\n"
    laid_out(tmp_path, {"args.yaml": big, "train.py": "pass\n", "small.yaml": TRAINER, "accelerate.yaml": FSDP2})
    monkeypatch.chdir(tmp_path)
    given = ["--model", "model", "train.seq_len=128", "--gpu-memory", "1200MiB", *SCRIPT]
    assert shardkit(*GATE, "--from", "args.yaml", *given) == 2
    out, err = capsys.readouterr()
    assert "#SBATCH" not in out
    *changes, cause, fix = err.splitlines()
    assert "on each GPU of 1.17 GiB" in cause and "--force" in fix
    advised = fix.removeprefix("  fix: ").removesuffix(", or submit it anyway with --force").split(", ")
    assert {"per_device_train_batch_size: 256", "gradient_accumulation_steps: 2"} < set(advised), fix
    assert any(line.startswith("gradient_checkpointing: true ") for line in changes)
    assert shardkit(*GATE, "--force", "--from", "args.yaml", *given) == 0
    assert "#SBATCH" in capsys.readouterr().out

    assert shardkit(*GATE, "--from", "small.yaml", "accelerate.yaml", *given) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash") and "planned: " in err, "stdout is the batch script"
    assert "is read by `accelerate launch` alone" in err and "ACCELERATE_USE_FSDP=true" in err


def test_ranks_of_torchrun_do_not_read_accelerates_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    ddp = "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"
    for text, missing in ((FSDP2, "ACCELERATE_USE_FSDP=true, ACCELERATE_MIXED_PRECISION=bf16"),
                          (ddp, "(ACCELERATE_MIXED_PRECISION=bf16"), (ddp.replace("bf16", "no"), "")):  # fmt: skip
        job = read_job(write(tmp_path, accelerate__yaml=text), str(tmp_path), 2)
        said = " ".join(only_for_accelerates_launcher(job))
        assert (missing in said) if missing else not said
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    job = read_job(write(tmp_path, accelerate__yaml=ddp), str(tmp_path), 2)
    assert not list(only_for_accelerates_launcher(job))


def test_the_mapping_shows_what_a_contradiction_leaves_open_and_other_ranks(tmp_path: Path) -> None:
    deepspeed = {**ZERO3, "gradient_accumulation_steps": 1}
    text = TRAINER + "gradient_accumulation_steps: 2\n"
    files = write(tmp_path, args__yaml=text, ds__json=deepspeed, accelerate__yaml=DDP.replace("2", "16"))
    lines = [" ".join(line.split()) for line in mapping(read_job(files, gpus=4))]
    assert "gradient_accumulation_steps: 2 → contradicted" in lines
    assert "gradient_accumulation_steps: 1 → contradicted" in lines
    assert "num_processes: 16 → 16 ranks (the plan: 4)" in lines


def test_every_auto_that_changes_memory_is_named_with_its_own_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning rate, betas, epsilon, warm-up and clipping change no memory, and stop no plan."""
    neutral = {"params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "type": "AdamW"}
    warmup = {"params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")}
    autos = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "gradient_accumulation_steps": "auto",
             "optimizer": neutral, "scheduler": {"type": "WarmupLR", **warmup}, "train_batch_size": "auto"}  # fmt: skip
    sizes = {"stage": 3, "reduce_bucket_size": "auto"}
    laid_out(tmp_path, {"ds.json": {**autos, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": sizes}})
    monkeypatch.chdir(tmp_path)
    plan = ("plan", "--from", "ds.json", "--model", "model", "train.seq_len=64")
    assert shardkit(*plan) == 2
    error = capsys.readouterr().err
    assert "3 settings" in error
    for key, fix in (
        ("bf16.enabled", "precision.mode=bf16"),
        ("gradient_accumulation_steps", "train.grad_accum_steps=1"),
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size=4"),
    ):
        (line,) = (line for line in error.splitlines() if f'{key}="auto"' in line)
        assert fix in line
    assert "--model" not in error
    filled = ["precision.mode=bf16", "train.grad_accum_steps=1", "train.micro_batch_size=2", "train.seq_len=64"]
    job = read_job(["ds.json"], "model", 2, overrides=filled)
    assert job.load(filled).config.parallel.strategy == "zero3"
    assert job.load(filled).config.parallel.ds_config["zero_optimization"]["reduce_bucket_size"] == 64 * 64


@pytest.mark.slow
def test_notes_stand_under_the_verdict_with_the_line_to_change(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lora.json").write_text(json.dumps({**LORA, "lora_alph": 3}))
    with open(files[0], "a", encoding="utf-8") as stream:
        stream.write("gradient_checkpointing: 'false'\n")
    plan = ("plan", "--from", *files, "--model", tmp_path, "--peft", tmp_path / "lora.json", "train.seq_len=64")
    assert shardkit(*plan, "--gpu-memory", "80GB", "run.device=cpu") == 0
    out = capsys.readouterr().out
    below = out.partition("verdict")[2]
    assert f"lora.json:1: lora_alph: unknown to the installed peft {installed('peft')}, which ignores it\n" in below
    assert "  fix: did you mean lora_alpha?\n" in below
    assert 'args.yaml:8: gradient_checkpointing="false" is text, which counts as true there\n  fix: remove' in below
    assert shardkit(*plan, "--gpu-memory", "80GB", "run.device=cpu", "--json") == 0
    first_note = json.loads(capsys.readouterr().out)["from"]["notes"][0]
    assert first_note["fix"] == "did you mean lora_alpha?"
