"""A run on conversations: two ranks tokenise once, train, and resume with the same data and tokenizer only."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import DataError, ShardkitError
from tests.data.chats import PLAIN, conversation, write_lines, write_tokenizer
from tests.ranks import run_ranks


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return {
        "model.vocab_size": 512, "model.d_model": 32, "model.n_layers": 1, "model.n_heads": 2, "train.seq_len": 48,
        "train.max_steps": 3, "train.micro_batch_size": 2, "train.eval_samples": 4, "parallel.strategy": "ddp",
        "data.path": str(root / "chat.jsonl"), "data.tokenizer": str(root / "tok"),
        "data.cache_dir": str(root / "cache"),
        "run.dir": str(root / "run"), "run.device": "cpu", "optim.lr": 1e-2, **more,
    }  # fmt: skip


def train(keys: dict[str, Any], of_rank: list[dict[str, Any]] | None = None) -> str:
    """Train by `keys`, and by those of the rank; returns the error."""
    from shardkit.config.load import load_config
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    if of_rank is not None:
        keys = keys | of_rank[int(os.environ["RANK"])]
    try:
        with start(load_config(None, keys)) as job:
            Trainer(job).fit()
    except ShardkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_tokenise_once_and_resume_refuses_other_data(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path / "tok")
    write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(80)))
    assert run_ranks(2, "tests.run.test_text_run:train", keys=settings(tmp_path)) == ["", ""]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]
    other = (tmp_path / "chat.jsonl").read_text().replace("answer 7 ", "answer 9 ")
    (tmp_path / "other.jsonl").write_text(other)
    of_rank = [{}, {"data.path": str(tmp_path / "other.jsonl")}]
    mixture = settings(tmp_path, **{"run.dir": str(tmp_path / "mixture")})
    for said in run_ranks(2, "tests.run.test_text_run:train", keys=mixture, of_rank=of_rank):
        assert re.search(r"ranks do not have the same data.*mixture: digest \w+ on 1 rank: 0 \(.+\); .*: 1 \(", said)
    again = settings(tmp_path, **{"run.resume": True, "train.max_steps": 5})
    assert run_ranks(2, "tests.run.test_text_run:train", keys=again) == ["", ""]
    (tmp_path / "other.jinja").write_text(PLAIN.replace("<|im_end|>", "<|endoftext|>"))
    changed = {**again, "train.max_steps": 7, "data.chat_template": str(tmp_path / "other.jinja")}
    for said in run_ranks(2, "tests.run.test_text_run:train", keys=changed):
        assert said.startswith(f"{DataError.__name__}: the data is not the one that the checkpoint was trained with")
    write_tokenizer(tmp_path / "tok", eos_token="<|im_end|>")
    for said in run_ranks(2, "tests.run.test_text_run:train", keys={**again, "train.max_steps": 7}):
        assert said.startswith(f"{DataError.__name__}: the tokenizer is not the one")
