"""`shardkit plan --from`, `check` and `convert-config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from shardkit.cli.foreign import left_out, save
from shardkit.config import capability
from shardkit.config.foreign.translate import read_job
from shardkit.config.load import load_config
from shardkit.plan.client import plan
from shardkit.plan.model.estimate import MemoryEstimate, PeakEstimate
from shardkit.plan.target import choose_target
from tests.config.foreign.test_lint import FSDP2, TRAINER, ZERO3, write
from tests.config.foreign.test_translate import MODEL

from .test_main import shardkit


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A Trainer's file, its DeepSpeed file and a model's folder."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    deepspeed = {**ZERO3, "zero_optimization": {**ZERO3["zero_optimization"], "offload_optimizer": {"device": "none"}}}
    text = TRAINER + "per_device_train_batch_size: 2\nuse_cpu: true\n"
    return write(tmp_path, args__yaml=text, ds__json=deepspeed)


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
    assert "loading: " in out.partition("not part of the plan")[2]

    assert shardkit("plan", "--from", files[0], "--from", files[1], *model, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    here = load_config(None, {**found["from"]["settings"], "train.seq_len": 64}).config
    assert found["peak"]["allocated"] == plan(here, choose_target(here, 2), bucket_views=False).peak.allocated
    assert {said["fate"] for said in found["from"]["keys"]} >= {"mapped", "default", "auto", "absent"}


@pytest.mark.slow
def test_ranks_come_from_accelerates_file_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (file,) = write(tmp_path, accelerate__yaml=FSDP2.replace("num_processes: 16", "num_processes: 4"))
    given = ("--from", file, "--model", tmp_path, "train.seq_len=64", "train.micro_batch_size=1", "run.device=cpu")
    assert shardkit("plan", *given) == 0
    assert "fsdp on 4 × cpu" in capsys.readouterr().out
    assert read_job([file], str(tmp_path), 2).gpus == 2


def test_a_search_starts_from_a_config_that_every_engine_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    found = read_job(write(tmp_path, accelerate__yaml=FSDP2, args__yaml=TRAINER), str(tmp_path))
    assert found.settings["precision.autocast"] is True
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no config is named"),
        (("-", "--model", "x"), "belongs to --from"),
        (("--from", "gone.json"), "gone.json cannot be read"),
    ],
)
def test_a_plan_of_nothing_is_a_user_error(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shardkit("plan", *arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "\n  fix: " in error


def test_open_points_are_one_line_each(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert shardkit("plan", "--from", files[1]) == 2
    error = capsys.readouterr().err
    assert '"auto", but no other file says what it becomes' in error
    assert "pass --model" in error


def test_check_exits_as_linters_do(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shardkit("check", *files) == 0
    assert capsys.readouterr().out == "errors: 0, warnings: 0\n"
    (tmp_path / "args.yaml").write_text(TRAINER + "evaluation_strategy: epoch\n")
    assert shardkit("check", *files) == 1
    out = capsys.readouterr().out
    assert "error: " in out
    assert "  fix: did you mean eval_strategy?" in out
    assert shardkit("check", *files, "--json") == 1
    assert json.loads(capsys.readouterr().out)[0]["level"] == "error"
    (tmp_path / "ds.json").write_text('{"zero_optimization": ')
    assert shardkit("check", *files) == 2
    assert "ends early" in capsys.readouterr().err


def test_convert_config_writes_the_file_and_lists_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accelerate.yaml"
    assert shardkit("convert-config", "configs/fsdp.yaml", "--to", "accelerate", "--gpus", 8, "--out", out) == 0
    error = capsys.readouterr().err
    assert "not said there: optim.lr=0.0002" in error
    assert yaml.safe_load(out.read_text())["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert shardkit("convert-config", "configs/zero2.yaml", "--to", "deepspeed") == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["stage"] == 2
    assert shardkit("convert-config", "configs/fsdp.yaml", "--to", "deepspeed") == 2
    assert "parallel.strategy='fsdp' cannot be said" in capsys.readouterr().err
    assert shardkit("convert-config", "configs/fsdp.yaml", "--to", "lightning") == 2
    assert shardkit("convert-config", "configs/fsdp.yaml", "--to", "trainer", "--out", tmp_path / "no" / "x.yaml") == 2
    assert "cannot be written" in capsys.readouterr().err
