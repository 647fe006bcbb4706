"""A tokenizer.json of a stranger: its library's panics are two lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.data.tokenizer import load_tokenizer
from shardkit.errors import ConfigError
from tests.data.chats import write_tokenizer

pytest.importorskip("transformers")


@pytest.fixture
def honest(tmp_path: Path) -> dict[str, Any]:
    write_tokenizer(tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / "tokenizer.json").read_text())
    return found


def refused(tmp_path: Path, content: dict[str, Any]) -> str:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as found:
        load_tokenizer(tmp_path / "tokenizer.json")
    return found.value.cause


def test_a_pattern_that_panics_is_refused(honest: dict[str, Any], tmp_path: Path) -> None:
    nested = "(" * 20_000 + "a" + ")" * 20_000
    split = {"type": "Split", "pattern": {"Regex": nested}, "behavior": "Isolated", "invert": False}
    assert "tokenizer.json" in refused(tmp_path, {**honest, "pre_tokenizer": split})
