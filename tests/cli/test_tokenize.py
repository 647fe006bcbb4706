"""`shardkit tokenize`: a corpus that runs map, or two lines and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.config.schema import DataConfig
from shardkit.data.store import Documents
from shardkit.data.tokenize import open_source
from shardkit.data.tokenizer import load_tokenizer
from tests.commands import Done, python_m
from tests.data.chats import conversation, write_lines, write_tokenizer

pytest.importorskip("transformers")


def tokenize(folder: Path, source: str, tokenizer: str, *more: str) -> Done:
    return python_m("shardkit.cli", "tokenize", str(folder / source), str(folder / "out"), "--tokenizer",
                    str(folder / tokenizer), *more)  # fmt: skip


@pytest.mark.slow
def test_a_corpus_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok")
    write_lines(tmp_path / "bad.jsonl", [{"messages": conversation(0)}, '{"messages": ['])
    process = tokenize(tmp_path, "bad.jsonl", "tok")
    assert process.returncode == 2
    assert "bad.jsonl:2: not JSON" in process.stderr and process.stderr.count("\n") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "tok"]

    process = tokenize(tmp_path, "bad.jsonl", "tok", "data.max_bad_rows=0.5", "data.loss_on=all")
    assert process.returncode == 0, process.stderr
    assert "1 of 2 rows left out" in process.stdout
    store, manifest = open_source(DataConfig(max_bad_rows=0.5), load_tokenizer(tmp_path / "tok"), str(tmp_path / "out"))
    assert len(Documents([store])) == manifest["n_documents"] == 1
