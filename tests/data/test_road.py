"""The road from a row to a batch, by the files of shardkit that execute on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.data.loader import BatchSchedule, StepLoader

from .chats import conversation, write_lines, write_tokenizer
from .test_text import config

MOST = 12


def test_a_row_reaches_its_batch_through_few_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from shardkit.data.text_data import TextData

    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(40)))
    write_tokenizer(tmp_path / "tok")
    settings = config(tmp_path, path)
    root = Path(shardkit.__file__).parent
    files: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(root)) and frame.f_code.co_name != "<module>":
            files.add(str(Path(name).relative_to(root)))

    sys.setprofile(note)
    try:
        text = TextData(settings, 512, "model.vocab_size")
        data = text.dataset("train")
        schedule = BatchSchedule(len(data), 4, 4, 1, 0, 1, 0, True, False)
        loader = StepLoader(data, schedule, text.collate, n_steps=2)
        batch = next(loader)
    finally:
        sys.setprofile(None)
    loader.close()
    assert len(batch.micro_batches[0][0]["tokens"]) == 4
    with capsys.disabled():
        print(f"\na row of JSON to a batch: {len(files)} files: {', '.join(sorted(files))}")
    assert len(files) <= MOST
