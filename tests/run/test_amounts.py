"""What a run says of its data: how many train, how many validate, and how many passes its steps make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.data.loader import BatchSchedule, State
from shardkit.report.measure import status
from shardkit.report.read import read_run
from shardkit.run import checks
from shardkit.run.checks import val_parts
from shardkit.tasks.load import load_task
from tests.commands import python_m
from tests.data.chats import conversation, write_lines, write_tokenizer
from tests.launch.jobs import losses, settings


def of(tmp_path: Path, **more: Any) -> RunConfig:
    keys = {"data.cache_dir": str(tmp_path / "cache"), "train.seq_len": 48, "model.vocab_size": 512}
    return load_config(None, keys | {key.replace("__", "."): value for key, value in more.items()}).config


def said(config: RunConfig) -> str:
    """The line on the split, as a run prints it."""
    task = load_task(checks.without_validation(config))
    data = task.dataset("train")
    return checks.describe_split(config, data, val_parts(task) if config.train.eval_samples else {})


@pytest.fixture
def chats(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path / "tok")
    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(80)))
    return {"data__path": str(path), "data__tokenizer": str(tmp_path / "tok")}


@pytest.mark.parametrize("packing", ["none", "packed"])
def test_held_out_conversations_are_counted_and_named_and_without_evaluation_all_train(
    packing: str, chats: dict[str, Any], tmp_path: Path
) -> None:
    line = said(of(tmp_path, **chats, data__packing=packing))
    n_train, n_val = (int(word) for word in line.replace(",", "").split() if word.isdigit())
    assert n_train + n_val == 80 and 0 < n_val < 16, line
    assert f"{n_train} conversations train, {n_val} validate (data.val_fraction=0.05; train.eval_samples=0" in line
    everything = said(of(tmp_path, **chats, data__packing=packing, train__eval_samples=0))
    assert everything == "data: all 80 conversations train (train.eval_samples=0: no evaluation)"
    named = said(of(tmp_path, **chats, data__packing=packing, data__val_path=chats["data__path"]))
    assert "data: 80 conversations train, 80 validate (data.val_path=" in named


@pytest.mark.parametrize("n_files", [1, 3])
def test_without_evaluation_all_text_trains(n_files: int, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(n_files):
        (tmp_path / f"text/{number}.txt").write_text("some words " * 100)
    sizes = {}
    for samples in (4, 0):
        config = of(tmp_path, data__path=str(tmp_path / "text"), train__eval_samples=samples)
        data = load_task(checks.without_validation(config)).dataset("train")
        sizes[samples] = checks.amount(data).tokens or 0
    assert sizes[0] == n_files * 1101 > sizes[4]


def test_without_evaluation_a_bin_trains_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "some.bin").write_bytes(bytes(2 * 1000))
    line = said(of(tmp_path, data__path=str(tmp_path / "some.bin"), train__eval_samples=0))
    assert line.startswith("data: all 21 windows of 48 tokens train")


@pytest.mark.parametrize(
    ("keys", "step", "position", "last"),
    [
        ({}, 0, State(), 100),
        ({"epochs": 3}, 0, State(), 21),
        ({"epochs": 0.5}, 0, State(), 4),
        ({"epochs": 3, "max_steps": 5}, 0, State(), 5),
        ({"epochs": 3}, 7, State(1, 0), 21),
        ({"epochs": 2}, 13, State(1, 32), 17),  # 13 steps of another size made a pass and a half
        ({"epochs": 1}, 14, State(2, 0), 14),
    ],
)
def test_a_run_ends_with_its_last_pass_or_at_its_limit(
    keys: dict[str, Any], step: int, position: State, last: int
) -> None:
    train = load_config(None, {f"train.{key}": value for key, value in keys.items()}).config.train
    assert checks.last_step(train, BatchSchedule(64, 10, 10, 1, 0, 1, 0, True, False), step, position) == last


def test_epochs_end_a_run_and_more_of_them_continue_it(tmp_path: Path) -> None:
    args = [*settings(tmp_path / "run", train__micro_batch_size=16, train__epochs=1), "train.max_steps=50"]
    done = python_m("shardkit.train", *args, code=0)
    assert "a pass: 64 samples, 4 steps; 4 steps are 1 pass\n" in done.stdout and "step 4/4 " in done.stdout
    assert "warning" not in done.stderr
    assert status(read_run(tmp_path / "run")) == (True, "finished 4 of 4 steps")
    args = settings(tmp_path / "run", train__micro_batch_size=16, train__epochs=2.5)
    args = [item for item in args if not item.startswith("train.max_steps=")]
    python_m("shardkit.train", *args, "run.resume=true", code=0)
    assert sorted(losses(tmp_path / "run")) == list(range(1, 11))
    assert status(read_run(tmp_path / "run")) == (True, "finished 10 of 10 steps")


def test_many_passes_are_doubted_at_start(tmp_path: Path) -> None:
    done = python_m(
        "shardkit.train", *settings(tmp_path / "run", train__micro_batch_size=64, train__max_steps=21), code=0
    )
    assert "warning: train.max_steps=21 takes each sample 21 times" in done.stderr
