"""The ladder and the largest model: predictions that real runs bear out, and memory that runs out as a result."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from shardkit.cli.plan import ConfigJob
from shardkit.config import capability
from shardkit.config.load import load_config, resolve_batch
from shardkit.config.schema import ModelConfig
from shardkit.errors import ConfigError
from shardkit.models.transformer import Transformer
from shardkit.plan.client import Planner
from shardkit.plan.model.estimate import MemoryEstimate, PeakEstimate
from shardkit.plan.search.ladder import (
    FINEST,
    _stacked,
    batch_sizes,
    climb,
    default_rungs,
    largest,
    model_sizes,
    parse_rung,
    save,
    table,
)
from shardkit.plan.search.trial import Trial, run_trial, trial_settings
from shardkit.plan.target import Target
from tests.commands import python_m
from tests.ranks import REPO

CPU = Target(1, None, 1)
SMALL = ["model.preset=debug", "run.device=cpu", "train.micro_batch_size=8", "optim.implementation=foreach"]


def run(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return python_m("shardkit.cli", *args, code=code)


def test_rungs_build_on_each_other_and_own_ones_are_read() -> None:
    assert default_rungs(1)[0].name == "fp32"
    assert parse_rung("mine: precision.mode=bf16 activation.policy=full").settings == (
        "precision.mode=bf16", "activation.policy=full",
    )  # fmt: skip
    assert "--rung 'nonsense'" in run("ladder", "-", "--rung", "nonsense", "--dry-run", code=2).stderr


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("world_size", [1, 8])
def test_every_config_has_a_ladder_whose_rungs_can_be(path: Path, world_size: int) -> None:
    rungs = default_rungs(world_size, load_config(path).config)
    texts = load_config(path).config.task.name not in ("image_classification", "super_resolution")
    assert len(rungs) == 5 + texts
    for _, overrides in _stacked(rungs, lambda more: load_config(path, more).config):
        config = load_config(path, overrides).config
        capability.check(config, device="cuda", world_size=world_size, local_world_size=world_size)


@pytest.mark.parametrize(
    ("rungs", "cause"),
    [
        (["a: parallel.strategy=ddp", "b: parallel.strategy=dpp"], "rung 'b': parallel.strategy='dpp'"),
        (["a: parallel.strategy=ddp", "b: model.n_layer=3"], "rung 'b': .*n_layer"),
        (["a: parallel.strategy=ddp", "a: precision.mode=bf16"], "two rungs are called 'a'"),
    ],
)
def test_a_rung_that_cannot_be_is_refused_before_anything_runs(rungs: list[str], cause: str) -> None:
    load = lambda more: load_config(None, more).config  # noqa: E731
    steps = climb(load, [*map(parse_rung, rungs)], CPU, lambda *_: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=cause):
        next(steps)


def test_what_cannot_be_planned_is_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(self: Planner, config: object) -> MemoryEstimate:
        raise ConfigError("needs the value of a tensor | at my.py:3", "give it plan_loss")

    monkeypatch.setattr(Planner, "predict", predict)
    rungs = [parse_rung("plain: parallel.strategy=single"), parse_rung("bf16: precision.mode=bf16")]
    ran = Trial("ok", peak=2**30, tokens_per_s=1e3, losses=(2.0, 1.0))
    steps = list(climb(lambda more: load_config(None, more).config, rungs, CPU, lambda settings, place: ran))
    assert [(step.predicted, step.trial, step.same_loss) for step in steps] == [(None, ran, True)] * 2
    (row,) = table(list(climb(lambda more: load_config(None, more).config, rungs[:1], CPU, None))).splitlines()[2:]
    assert row.endswith(r"| needs the value of a tensor \| at my.py:3 |")


def test_a_folder_that_takes_nothing_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/below", Path("/proc/ladder")):
        with pytest.raises(ConfigError, match=f"--out {folder} cannot be written"):
            ConfigJob("-").tried(1, folder, 3, None)
        with pytest.raises(ConfigError, match=f"--out {folder} cannot be written"):
            save([], folder, None)


def test_an_earlier_runs_post_mortem_is_not_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oom").mkdir()
    (tmp_path / "oom/rank0.json").write_text("{}")
    failed = subprocess.CompletedProcess([], 2, "", "error: no such data\n  fix: name another\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **how: failed)
    assert run_trial(None, [], 1, tmp_path) == Trial("failed", message="error: no such data")


@pytest.mark.release
def test_a_dry_ladder_predicts_every_rung_for_a_card_that_is_not_here(tmp_path: Path) -> None:
    done = run("ladder", "-", "model.preset=debug", "--gpu", "l4", "--dry-run", "--out", str(tmp_path))
    rungs = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert len(rungs) == 6
    assert all(rung["predicted"] > 0 and rung["trial"] is None for rung in rungs)
    assert rungs[1]["predicted"] < rungs[0]["predicted"]
    assert done.stdout.count("|\n") == 8


@pytest.mark.release
def test_rungs_run_out_of_memory_or_fit_as_predicted(tmp_path: Path) -> None:
    rungs = ["--rung", "plain: parallel.strategy=single", "--rung", "+ checkpointing: activation.policy=full"]
    run("ladder", "-", *SMALL, "--memory-cap", "60MiB", *rungs, "--out", str(tmp_path), "--steps", "3")
    plain, checkpointed = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert plain["verdict"] == "does not fit" and plain["trial"]["outcome"] == "out of memory"
    assert checkpointed["verdict"] in ("fits", "tight") and checkpointed["trial"]["outcome"] == "ok"
    assert checkpointed["trial"]["peak"] == pytest.approx(checkpointed["predicted"], rel=0.01)
    assert checkpointed["trial"]["tokens_per_s"] > 0
    assert "out of memory" in (tmp_path / "ladder.md").read_text()


@pytest.mark.parametrize(
    ("model", "least"),
    [
        (ModelConfig(), 1e6),
        (ModelConfig(n_heads=16), 1e6),
        (ModelConfig(d_model=1024, n_heads=64), 1e6),
        (ModelConfig(preset="124m"), 1e7),  # its vocabulary alone is 100 thousand for each unit of width
        (ModelConfig(preset="1.3b"), 1e7),
    ],
)
def test_sizes_grow_by_no_more_than_2_percent_where_they_matter(model: ModelConfig, least: float) -> None:
    sizes = [size.amount for size in model_sizes(model, 1e10)]
    assert sizes[0] < least and sizes[-1] > 0.98e10
    assert all(1 < after / before <= FINEST for before, after in pairwise(sizes) if before > least)


def test_heads_stay_as_even_as_the_configs_and_fp8_has_widths_that_its_products_take() -> None:
    """torch has no memory-efficient attention for others in fp32: a larger model with even heads needs less."""
    start = ModelConfig(preset="355m")
    for size in model_sizes(start, 1e10)[:-1]:
        chosen = {"model.n_heads": "16", **dict(item.split("=") for item in size.settings)}
        assert size.amount < 1e9 or int(chosen["model.d_model"]) // int(chosen["model.n_heads"]) % 8 == 0, chosen
    of_fp8 = model_sizes(start, 1e10, multiple=16)
    assert all(int(dict(item.split("=") for item in one.settings)["model.d_model"]) % 16 == 0 for one in of_fp8)
    assert all(b.amount / a.amount <= FINEST for a, b in pairwise(of_fp8) if a.amount > 1e9)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_size_has_the_parameters_that_its_settings_make(tied: str) -> None:
    start = load_config(None, ["model.n_heads=6", "model.d_model=96", f"model.tie_weights={tied}"]).config.model
    for size in model_sizes(start, 1e6)[::40]:
        changed = load_config(None, [f"model.tie_weights={tied}", "model.n_heads=6", *size.settings]).config.model
        with torch.device("meta"):
            assert sum(p.numel() for p in Transformer(changed).parameters()) == size.amount, size
        assert 3 <= changed.n_heads <= 12


def test_a_global_batch_does_not_limit_the_micro_batches_that_are_looked_at() -> None:
    fixed = ["train.global_batch_size=64", "train.micro_batch_size=8"]
    accumulated = resolve_batch(load_config(None, fixed).config, 2)
    for size in batch_sizes(accumulated)[:50]:
        changed = load_config(None, [*fixed, *size.settings]).config
        assert (changed.train.micro_batch_size, resolve_batch(changed, 2)) == (size.amount, 4)


def test_the_smallest_that_does_not_fit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = PeakEstimate(2**30, 2**30, 2**30, "forward", "")
    needs = MemoryEstimate("cpu", 1, 0, 1, 1, "cpu", {}, peak, 1, 0, {}, device_memory=2**29)
    monkeypatch.setattr(Planner, "predict", lambda self, config: needs)
    limited = replace(CPU, cap=2**29)
    with pytest.raises(ConfigError, match=r"micro_batch_size=1 fits: .* 1\.00 GiB .* of 0\.50 GiB") as found:
        largest(lambda more: load_config(None, more).config, batch_sizes(), limited, None)
    assert found.value.exit_code == 4
    with pytest.raises(ConfigError, match="there is no limit"):
        largest(lambda more: load_config(None, more).config, batch_sizes(), CPU, None)


GPT2 = {"model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 512}
HERE = ["run.device=cpu", "train.seq_len=32", "optim.implementation=foreach"]
LIMITS = {
    "batch, 2 ranks of FSDP2": [
        "--find", "batch", "--gpus", "2", "--memory-cap", "100MiB", "model.preset=debug", "parallel.strategy=fsdp",
    ],
    "batch, GPT-2 of transformers": [
        "--find", "batch", "--memory-cap", "80MiB", "task.name=hf_causal_lm", f"model.hf={json.dumps(GPT2)}",
        "parallel.strategy=single",
    ],
    "model, 2 ranks of FSDP2": [
        "--find", "model", "--gpus", "2", "--memory-cap", "100MiB", "model.preset=debug", "parallel.strategy=fsdp",
        "train.micro_batch_size=1",
    ],
}  # fmt: skip


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asked", LIMITS)
def test_the_largest_works_and_one_that_is_hardly_larger_runs_out_of_memory(asked: str, tmp_path: Path) -> None:
    done = run("max-model", "-", *HERE, *LIMITS[asked], "--confirm", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "real runs: the next size ran out of memory" in done.stdout
    assert 0 < float(done.stdout.rpartition("(+")[2].partition("%")[0]) <= 2.0
    outcomes = [bool(list((folder / "oom").glob("*.json"))) for folder in sorted(tmp_path.iterdir())]
    assert outcomes.count(False) >= 1 and outcomes.count(True) >= 1


def test_a_recipe_that_evaluates_is_tried_without_evaluation() -> None:
    settings = trial_settings(["data.val_path=held_out.jsonl"], Path("run"), 4, None)
    loaded = load_config(REPO / "examples" / "first_hour.yaml", settings).config
    assert loaded.train.eval_samples == 0
    capability.check(loaded, device="cpu", world_size=2, local_world_size=2)
