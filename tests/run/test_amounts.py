"""What a run says of its data: how many train, how many validate, and how many passes its steps make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.config.schema import RunConfig
from shardkit.run import amounts
from shardkit.run.evaluate import val_parts
from shardkit.tasks.load import load_task
from tests.data.chats import conversation, write_lines, write_tokenizer


def of(tmp_path: Path, **more: Any) -> RunConfig:
    keys = {"data.cache_dir": str(tmp_path / "cache"), "train.seq_len": 48, "model.vocab_size": 512}
    return load_config(None, keys | {key.replace("__", "."): value for key, value in more.items()}).config


def said(config: RunConfig) -> str:
    """The line on the split, as a run prints it."""
    task = load_task(amounts.without_validation(config))
    data = task.dataset("train")
    assert data is not None
    return amounts.describe_split(config, data, val_parts(task) if config.train.eval_samples else {})


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
        data = load_task(amounts.without_validation(config)).dataset("train")
        assert data is not None
        sizes[samples] = amounts.amount(data).tokens or 0
    assert sizes[0] == n_files * 1101 > sizes[4]


def test_without_evaluation_a_bin_trains_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "some.bin").write_bytes(bytes(2 * 1000))
    line = said(of(tmp_path, data__path=str(tmp_path / "some.bin"), train__eval_samples=0))
    assert line.startswith("data: all 21 windows of 48 tokens train")
