"""Plain text: a file is one document, which may span several pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..listing import TextFile, is_text
from .format import BadRow, LoadedRows, Piece, RowFormat, line_ranges, read_range


class PlainText(RowFormat):
    """Text files; binary ones among them are skipped."""

    name, suffixes, has_columns, continues, unit = "text", (), False, True, "byte"

    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        return []

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        if not is_text(file):
            return []
        return [
            Piece(file.path, self, start, stop, stop - start, ends=stop == file.size)
            for start, stop in line_ranges(file, n_bytes)
        ]

    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        try:
            yield read_range(piece).decode("utf-8")
        except UnicodeDecodeError as error:
            yield BadRow(0, f"invalid UTF-8 at byte {error.start}")

    def load(self, piece: Piece, columns: list[str] | None) -> LoadedRows:
        raise TypeError("plain text has no rows that could be read one by one")

    def survey(self, pieces: Sequence[Piece], digest: hashlib.blake2b) -> Iterator[int]:
        raise TypeError("plain text has no rows that could be counted")
