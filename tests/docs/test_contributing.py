"""CONTRIBUTING.md: its list of files can be read in an evening, and its example of a row format works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardkit.data.rows import formats, pieces
from shardkit.data.rows.format import BadRow, Piece, RowFormat

REPO = Path(__file__).resolve().parents[2]
TEXT = (REPO / "CONTRIBUTING.md").read_text()


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_reading_list_takes_an_evening() -> None:
    paths = re.findall(r"^\d+\. `([^`]+)`", section("An evening's reading"), re.MULTILINE)
    assert 8 <= len(paths) <= 12
    assert sum((REPO / path).read_text().count("\n") for path in paths) <= 2500


def test_a_row_format_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = section("Add a row format").partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"RowFormat": RowFormat, "Piece": Piece, "BadRow": BadRow, "Path": Path}
    exec(code, names)
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, names["TabSeparated"]()))
    path = tmp_path / "rows.tsv"
    path.write_text("prompt\tcompletion\n2 + 2\t4\nshort\n1 + 2\t3\n")
    files, row_format = formats.find_records(str(path))
    assert row_format.name == "tsv" and row_format.columns(files, set()) == ["prompt", "completion"]
    [piece] = pieces.cut(files, row_format)
    first, bad, last = pieces.rows(piece)
    assert first == {"prompt": "2 + 2", "completion": "4"} and last == {"prompt": "1 + 2", "completion": "3"}
    assert isinstance(bad, BadRow)
    assert row_format.load(piece, None).row(2) == (2, last)
