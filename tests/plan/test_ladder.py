"""The ladder and the largest model: predictions that real runs bear out, and memory that runs out as a result."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer

from shardkit.cli import __main__ as cli
from shardkit.cli.plan import ConfigJob
from shardkit.config import capability
from shardkit.config.load import load_config, resolve_batch
from shardkit.config.schema import ModelConfig, RunConfig
from shardkit.errors import ConfigError
from shardkit.models.transformer import Transformer
from shardkit.plan.client import Planner
from shardkit.plan.model.cost import TimeEstimate
from shardkit.plan.model.estimate import MemoryEstimate, PeakEstimate
from shardkit.plan.search.ladder import (
    FINEST,
    _stacked,
    batch_sizes,
    climb,
    default_rungs,
    largest,
    lengths,
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


def test_the_longest_sequence_keeps_to_parts_that_ranks_can_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def predict(self: Planner, config: RunConfig) -> MemoryEstimate:
        needed = config.train.seq_len * 2**20
        assert config.train.seq_len == config.model.max_seq_len and config.train.seq_len % config.parallel.cp == 0
        peak = PeakEstimate(needed, needed, needed, "forward", "")
        return MemoryEstimate("cpu", 1, 0, 1, 1, "cpu", {}, peak, needed, 0, {}, device_memory=2**40)

    monkeypatch.setattr(Planner, "predict", predict)
    app = typer.main.get_command(cli.app)
    given = ["plan", "-", "--longest", "--memory-cap", "1TiB", "run.device=cpu"]
    app.main([*given, "--gpus", "6", "parallel.cp=3"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("largest   1,034,496 tokens: train.seq_len=1034496 model.max_seq_len=")
    app.main([*given, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert 2**20 / 1.02 < found["largest"]["amount"] <= 2**20 < found["next_up"]["amount"]


@pytest.mark.parametrize("needs", [
    lambda length: 2**30 + 9_000 * length,
    lambda length: max(20 * 2**30, 18_000 * length),  # a short one's peak is that of its optimizer
    lambda length: -(-(5 * 2**30 + 30_000 * length) // (20 * 2**20)) * 20 * 2**20,  # whole pages
    lambda length: 2**30 + length**2,
    lambda length: 70 * 2**30 + 1_280 * length,
], ids=["line", "bend", "pages", "square", "flat"])  # fmt: skip
def test_the_longest_sequence_is_found_in_few_predictions(
    needs: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = []

    def predict(self: Planner, config: RunConfig) -> MemoryEstimate:
        predicted.append(config.train.seq_len)
        n_bytes = needs(config.train.seq_len)
        peak = PeakEstimate(n_bytes, n_bytes, n_bytes, "forward", "")
        return MemoryEstimate("cpu", 1, 0, 1, 1, "cpu", {}, peak, n_bytes, 0, {}, device_memory=80 * 2**30)

    monkeypatch.setattr(Planner, "predict", predict)
    limited, sizes = replace(CPU, cap=80 * 2**30), lengths(load_config(None, ["model.preset=debug"]).config)
    found = largest(lambda more: load_config(None, ["model.preset=debug", *more]).config, sizes, limited, None)
    assert needs(found.largest.amount) <= 80 * 2**30 < needs(found.next_up.amount)
    assert len(predicted) <= 12, predicted


def test_the_largest_is_searched_along_axes_which_it_names_with_what_each_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers that are shared take less; two ranks to a sequence save nothing; four to a layer are refused."""

    def predict(self: Planner, config: RunConfig, *, timed: bool = False) -> MemoryEstimate:
        model, parallel = config.model, config.parallel
        assert model.n_heads % (parallel.cp * parallel.tp) == 0
        if parallel.tp == 4:
            raise ConfigError("no layer can be shared by 4", "take 2")
        state = model.n_layers * model.d_model**2 * 12 / parallel.tp
        needed = round(state + config.train.micro_batch_size / parallel.tp * 2**28)
        peak = PeakEstimate(needed, needed, needed, "forward", "")
        sent = 2**30 * (parallel.tp - 1) + 2**29 * parallel.cp
        time = TimeEstimate(1.0 * parallel.cp, {}, 1.0, 600.0, False, sent)
        return MemoryEstimate("h100", 4, 0, 1, 1, "cpu", {}, peak, needed, 0, {}, device_memory=2**34, time=time)

    monkeypatch.setattr(Planner, "predict", predict)
    app = typer.main.get_command(cli.app)
    given = ["max-model", "-", "--gpus", "4", "--gpu-memory", "16GiB", "--gpu", "h100", "parallel.strategy=fsdp"]
    given += ["train.micro_batch_size=1"]

    def found(*more: str) -> tuple[str, list[str]]:
        app.main([*given, *more], standalone_mode=False)
        answer, _, layouts = capsys.readouterr().out.partition("\n\n")
        return answer.splitlines()[0], layouts.splitlines()

    answer, layouts = found()
    assert answer.endswith("parallel.tp=2") and "parallel.cp" not in answer
    rows = [re.split(r"\s{2,}", line) for line in layouts]
    assert rows[0] == ["does not fit", "parameters", "needs", "sent a token", "tokens/s"]
    costs = {name: rest[-2:] for name, *rest in rows[1:]}
    assert costs["fsdp"] == ["3.413 MiB", "600"] and costs["fsdp, tp 2"] == ["10.240 MiB", "600"]
    assert costs["fsdp, cp 2, tp 2"] == ["13.653 MiB", "300"]
    assert "fsdp, tp 4: no layer can be shared by 4" in layouts and not any("cp 2, tp 4" in line for line in layouts)
    alone, _ = found("parallel.tp=1")
    n_params = [int(line.split()[1].replace(",", "")) for line in (alone, answer)]
    assert "parallel" not in alone and 1.8 < n_params[1] / n_params[0] < 2.1
    # Groups of two have twice as many samples in the same memory: over all ranks that is no more, but for the rest.
    batch, layouts = found("--find", "batch", "model.preset=debug")
    assert batch == "largest   254 samples: train.micro_batch_size=127 parallel.tp=2" and "samples" in layouts[0]
    assert found("--find", "batch", "model.preset=debug", "parallel.tp=1")[0].startswith("largest   252 samples")


def test_what_fits_only_where_ranks_share_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def predict(self: Planner, config: RunConfig, *, timed: bool = False) -> MemoryEstimate:
        needed = 3 * 2**30 * config.train.micro_batch_size // (config.parallel.cp * config.parallel.tp)
        peak = PeakEstimate(needed, needed, needed, "forward", "")
        time = TimeEstimate(1.0, {}, 1.0, 600.0, False, 0.0)
        return MemoryEstimate("h100", 2, 0, 1, 1, "cpu", {}, peak, needed, 0, {}, device_memory=2**31, time=time)

    monkeypatch.setattr(Planner, "predict", predict)
    app = typer.main.get_command(cli.app)
    given = ["max-model", "-", "--find", "batch", "--gpus", "2", "--gpu-memory", "2GiB", "--gpu", "h100"]
    app.main([*given, "parallel.strategy=fsdp"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("largest   1 samples: train.micro_batch_size=1 parallel.tp=2\n")
    with pytest.raises(ConfigError, match=r"not even train\.micro_batch_size=1 fits") as refused:
        app.main([*given, "parallel.strategy=fsdp", "parallel.cp=1", "parallel.tp=1"], standalone_mode=False)
    assert refused.value.exit_code == 4
    with pytest.raises(ConfigError, match="--confirm trains all ranks on this machine"):
        app.main(["max-model", "-", "--confirm", "--gpus-per-node", "2"], standalone_mode=False)


def test_heads_are_multiples_of_the_ranks_that_share_them() -> None:
    sizes = model_sizes(ModelConfig(preset="124m"), 1e10, sharing=8)  # the preset has 12
    chosen = {int(dict(item.split("=") for item in size.settings)["model.n_heads"]) for size in sizes}
    assert {8, 16} <= chosen <= {8, 16, 24}
    assert all(after.amount / before.amount <= FINEST for before, after in pairwise(sizes) if before.amount > 1e9)
    assert model_sizes(ModelConfig(n_heads=2), 1e8, sharing=8) == []


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
LONGEST = [
    "--gpus", "2", "--memory-cap", "100MiB", "model.preset=debug", "parallel.strategy=fsdp", "parallel.cp=2",
    "train.micro_batch_size=1",
]  # fmt: skip


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asked", [*LIMITS, "length, 2 ranks that share sequences"])
def test_the_largest_works_and_one_that_is_hardly_larger_runs_out_of_memory(asked: str, tmp_path: Path) -> None:
    command = ["max-model", "-", *LIMITS[asked]] if asked in LIMITS else ["plan", "-", "--longest", *LONGEST]
    done = run(*command, *HERE, "--confirm", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "real runs: the next size ran out of memory" in done.stdout
    assert 0 < float(done.stdout.rpartition("(+")[2].partition("%")[0]) <= (2.0 if asked in LIMITS else 3.0)
    outcomes = [bool(list((folder / "oom").glob("*.json"))) for folder in sorted(tmp_path.iterdir())]
    assert outcomes.count(False) >= 1 and outcomes.count(True) >= 1


def test_a_recipe_that_evaluates_is_tried_without_evaluation() -> None:
    settings = trial_settings(["data.val_path=held_out.jsonl"], Path("run"), 4, None)
    loaded = load_config(REPO / "examples" / "first_hour.yaml", settings).config
    assert loaded.train.eval_samples == 0
    capability.check(loaded, device="cpu", world_size=2, local_world_size=2)
