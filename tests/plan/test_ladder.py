"""The ladder and the largest model: predictions that real runs bear out, and memory that runs out as a result."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from shardkit.config import ModelConfig
from shardkit.plan.ladder import default_rungs, parse_rung
from shardkit.plan.max_model import FINEST, model_sizes

REPO = Path(__file__).resolve().parents[2]
SMALL = ["model.preset=debug", "run.device=cpu", "train.micro_batch_size=8", "optim.implementation=foreach"]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shardkit.cli", *args], capture_output=True, text=True, cwd=REPO)


def test_rungs_build_on_each_other_and_own_ones_are_read() -> None:
    assert default_rungs(1)[0].name == "fp32"
    assert parse_rung("mine: precision.mode=bf16 activation.policy=full").settings == (
        "precision.mode=bf16", "activation.policy=full",
    )  # fmt: skip
    refused = run("ladder", "-", "--rung", "nonsense", "--dry-run")
    assert refused.returncode == 2 and "--rung 'nonsense'" in refused.stderr


@pytest.mark.slow
def test_a_dry_ladder_predicts_every_rung_for_a_card_that_is_not_here(tmp_path: Path) -> None:
    done = run("ladder", "-", "model.preset=debug", "--gpu", "l4", "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rungs = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert len(rungs) == 6
    assert all(rung["predicted"] > 0 and rung["trial"] is None for rung in rungs)
    assert rungs[1]["predicted"] < rungs[0]["predicted"]
    assert done.stdout.count("|\n") == 8


@pytest.mark.slow
def test_rungs_run_out_of_memory_or_fit_as_predicted(tmp_path: Path) -> None:
    rungs = ["--rung", "plain: parallel.strategy=single", "--rung", "+ checkpointing: activation.policy=full"]
    done = run("ladder", "-", *SMALL, "--memory-cap", "60MiB", *rungs, "--out", str(tmp_path), "--steps", "3")
    assert done.returncode == 0, done.stderr
    plain, checkpointed = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert plain["verdict"] == "does not fit" and plain["trial"]["outcome"] == "out of memory"
    assert checkpointed["verdict"] in ("fits", "tight") and checkpointed["trial"]["outcome"] == "ok"
    assert checkpointed["trial"]["peak"] == pytest.approx(checkpointed["predicted"], rel=0.01)
    assert checkpointed["trial"]["tokens_per_s"] > 0
    assert "out of memory" in (tmp_path / "ladder.md").read_text()


def test_sizes_grow_by_no_more_than_2_percent_where_they_matter() -> None:
    sizes = model_sizes(ModelConfig(d_model=128, n_layers=4, n_heads=4), 5e6)
    large = [size.amount for size in sizes if size.amount > 1e6]
    assert all(1 < after / before <= FINEST + 0.01 for before, after in pairwise(large))


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


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asked", LIMITS)
def test_the_largest_works_and_one_that_is_hardly_larger_runs_out_of_memory(asked: str, tmp_path: Path) -> None:
    done = run("max-model", "-", *HERE, *LIMITS[asked], "--confirm", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "real runs: the next size ran out of memory" in done.stdout
    assert 0 < float(done.stdout.rpartition("(+")[2].partition("%")[0]) <= 2.0
    outcomes = [bool(list((folder / "oom").glob("*.json"))) for folder in sorted(tmp_path.iterdir())]
    assert outcomes.count(False) >= 1 and outcomes.count(True) >= 1
