"""JSON lines: one JSON object on each line."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import mmap
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from ...errors import DataError
from ..listing import TextFile, unreadable
from .format import BadRow, LoadedRows, Piece, RowFormat, line_ranges, read_range


class JsonLines(RowFormat):
    """Files with a JSON object on each line; blank lines are skipped."""

    name, suffixes, suffixes_alone, unit = "jsonl", (".jsonl", ".ndjson"), (".json",), "byte"
    encoded_bytes: ClassVar[tuple[int, int]] = 1 << 17, 1 << 21
    """Fewest and most bytes of a piece that is tokenised beforehand: small, so that all workers end together."""
    encoded_pieces: ClassVar[int] = 16
    """Pieces of a small set, so that every worker has some. The number of workers must not change the pieces."""

    def encoded_piece_bytes(self, files: Sequence[TextFile]) -> int | None:
        fewest, most = self.encoded_bytes
        return max(fewest, min(most, sum(file.size for file in files) // self.encoded_pieces))

    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        """All columns of the first object, and those of `wanted` that any other object has.

        Raises:
            DataError: a file cannot be read, or the first file holds no object.
        """
        _refuse_other_files(files[0])
        names: list[str] = []
        for file in files:
            try:
                with open(file.path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    _scan(content, candidates, names)
            except OSError as error:
                raise unreadable(file.path, error) from error
            if not names:
                raise _no_object(file)
        return names

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        _refuse_other_files(file)
        return [Piece(file.path, self, start, stop, stop - start) for start, stop in line_ranges(file, n_bytes)]

    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        for number, line in enumerate(io.BytesIO(read_range(piece))):
            yield _parse_line(number, line)

    def load(self, piece: Piece, columns: list[str] | None) -> LoadedRows:
        return _Lines([(n, line) for n, line in enumerate(io.BytesIO(read_range(piece))) if line.strip()])

    def survey(self, pieces: Sequence[Piece], digest: hashlib.blake2b) -> Iterator[int]:
        for piece in pieces:
            content = read_range(piece)
            digest.update(content)
            yield sum(1 for line in io.BytesIO(content) if line.strip())


class _Lines:
    def __init__(self, lines: list[tuple[int, bytes]]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> tuple[int, Any]:
        number, line = self._lines[index]
        return number, _parse_line(number, line)


def _parse_line(number: int, line: bytes) -> Any:
    """The object on a line of JSON, a `BadRow`, or None for a blank line.

    Python's writers let numbers pass that are not finite. They make a bad row only where a column that is read holds
    them: `Columns.values` refuses them for every format.
    """
    if not line.strip():
        return None
    try:
        # Editors on Windows begin a file with the mark.
        parsed = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(number, f"invalid UTF-8 at byte {error.start} of the line")
    except RecursionError:
        return BadRow(number, "not JSON: nested too deeply")
    except ValueError as error:
        return BadRow(number, f"not JSON: {error}")
    return parsed if isinstance(parsed, dict) else BadRow(number, f"not a JSON object but {type(parsed).__name__}")


def _no_object(file: TextFile) -> DataError:
    """The error for a file without any JSON object; it says what is wrong with the first line."""
    with open(file.path, "rb") as stream:
        row = _parse_line(0, stream.readline(1 << 20))
    reason = f", the first is {row.reason}" if isinstance(row, BadRow) else ""
    fix = (
        "save it as UTF-8, with one JSON object a line" if "invalid UTF-8" in reason else "write one JSON object a line"
    )
    return DataError(f"{file.path} has no line with a JSON object{reason}", fix)


def _refuse_other_files(file: TextFile) -> None:
    """Refuse a file of one array, and one in another encoding, in which no line could be read."""
    with open(file.path, "rb") as stream:
        head = stream.read(4096)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{file.path} is UTF-16 text, not UTF-8", "save it as UTF-8: iconv -f utf-16 -t utf-8 FILE > NEW.jsonl"
        )
    if head.lstrip()[:1] == b"[":
        raise DataError(
            f"{file.path} is one JSON array, not a JSON object on each line",
            "write an object a line: jq -c '.[]' FILE.json > FILE.jsonl",
        )


def _scan(content: mmap.mmap, candidates: set[str], names: list[str]) -> None:
    """Add to `names` the wanted columns of these lines, or all columns of the first object if `names` is empty.

    Only lines where the quoted name occurs are parsed, which makes this as fast as reading the file.
    """
    position = 0
    while position < len(content) and (missing := candidates.difference(names)):
        if names:
            match = _member_pattern(missing).search(content, position)
            if match is None:
                return
            position = match.start()
        start = content.rfind(b"\n", 0, position) + 1
        stop = content.find(b"\n", position)
        stop = len(content) if stop < 0 else stop + 1
        row = _parse_line(0, content[start:stop])
        if isinstance(row, dict):
            names += [name for name in row if name in missing] if names else list(row)
        position = stop


def _member_pattern(names: set[str]) -> re.Pattern[bytes]:
    """A pattern for any of these names as a member of an object; for any object, if a name has several spellings."""
    if any(not re.fullmatch(r"[\w .-]+", name, re.ASCII) for name in names):
        return re.compile(rb"\{")
    return re.compile(b'"(?:' + b"|".join(re.escape(name.encode()) for name in sorted(names)) + b')"\\s*:')
