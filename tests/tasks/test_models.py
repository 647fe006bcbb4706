"""The built-in tasks on transformers models, under every strategy; their losses are those that were recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from shardkit.tasks.load import load_task
from tests.ranks import REPO, run_ranks
from tests.tasks import cases
from tests.tasks.golden import differences, golden, measured
from tests.texts import write_words

STRATEGIES = ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
TARGET = "tests.tasks.cases:records"


def compare(tasks: list[str], strategies: list[str], folder: Path) -> None:
    write_words(folder)
    one = run_ranks(1, TARGET, tasks=tasks, strategies=["single"], folder=str(folder))[0]
    for rank in run_ranks(2, TARGET, tasks=tasks, strategies=strategies, folder=str(folder), timeout=600):
        for (task, strategy), steps in rank.items():
            for step, want in zip(steps, one[task, "single"], strict=True):
                assert step["loss"] == pytest.approx(want["loss"], abs=1e-5), (task, strategy)
                assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4), (task, strategy)
                for name in ("val_loss", "val_accuracy", "val_psnr"):
                    assert step.get(name) == pytest.approx(want.get(name), abs=1e-4), (task, strategy, name)


@pytest.mark.slow
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    compare(["gpt2", "bert"], ["zero3"], tmp_path)


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", cases.TASKS)
def test_every_task_under_every_strategy(task: str, tmp_path: Path) -> None:
    compare([task], STRATEGIES, tmp_path)


@pytest.mark.parametrize("case", ["gpt2", "bert"])
def test_a_sequence_beyond_the_positions_is_refused(case: str, tmp_path: Path) -> None:
    write_words(tmp_path)
    settings = cases.settings(case, "single", 1, str(tmp_path)) | {"train.seq_len": 300}
    with pytest.raises(ConfigError, match=r"train.seq_len=300 is longer than the model's 256 positions"):
        load_task(load_config(None, settings).config)


@pytest.mark.parametrize("key", ["model.hf.vocab_size", "model.vocab_size"])
def test_a_vocabulary_that_does_not_cover_the_data_is_refused(key: str, tmp_path: Path) -> None:
    write_words(tmp_path)
    settings = cases.settings("gpt2", "single", 1, str(tmp_path)) | {key: 100}
    if key == "model.vocab_size":
        settings |= {"task.name": "causal_lm", "model.preset": "debug"}
    with pytest.raises(ConfigError, match=rf"{key}=100, but .* holds the token") as caught:
        load_task(load_config(None, settings).config).dataset("train")
    assert "at least 117" in caught.value.fix


SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"model.preset": "gpt2-debug", "train.max_steps": 60, "train.seq_len": 128, "data.cache_dir": None},
    "bert": {
        "model.preset": "bert-debug",
        "train.max_steps": 60,
        "train.seq_len": 128,
        "data.cache_dir": None,
        "parallel.strategy": "fsdp",
    },
    "vit": {"model.preset": "vit-debug", "train.max_steps": 120, "data.workers": 0},
    "swin2sr": {"model.preset": "swin2sr-debug", "train.max_steps": 120, "data.crop_size": 48, "data.workers": 0},
}


@pytest.mark.release
@pytest.mark.parametrize("name", SMALL)
def test_the_shipped_config_learns(name: str, tmp_path: Path) -> None:
    settings = {
        "run.dir": str(tmp_path / "run"), "run.device": "cpu", "precision.mode": "fp32", "optim.lr": 2e-3,
        "optim.warmup_steps": 10, "train.eval_every": None, "train.eval_samples": 64,
        "checkpoint.at_end": False, **SMALL[name],
    }  # fmt: skip
    with start(load_config(REPO / "configs" / f"{name}.yaml", settings)) as job:
        trainer = Trainer(job)
        records = list(trainer.steps())
    baseline = trainer.task.describe()
    first, last = (sum(r["loss"] for r in part) / 5 for part in (records[:5], records[-5:]))
    assert last < 0.85 * first
    if name in ("gpt2", "bert"):
        assert records[-1]["val_loss"] < 1.05 * baseline["unigram_cross_entropy"]
    elif name == "vit":
        assert records[-1]["val_accuracy"] > 2 * baseline["accuracy_by_chance"]
    else:
        assert records[-1]["val_psnr"] > 15


def test_the_losses_are_the_golden_ones() -> None:
    assert differences(measured(), golden()) == []
