"""Rows of text, JSON lines, parquet and arrow files, and of `datasets` folders: found, cut into pieces, read.

A piece is a part of a file that one worker reads: a range of bytes (text, JSON lines), row groups (parquet) or record
batches (arrow).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

from ...errors import DataError
from ..listing import RECORDS, TABLES, TextFile, find_files, is_text, unreadable
from .tabular import GroupReader, arrow_batches, damaged, parquet_batches, parquet_file, to_dicts, to_table

Kind = Literal["text", "jsonl", "parquet", "arrow"]
PIECE_BYTES = 1 << 23
"""Bytes of text or JSON lines in a piece; longer lines make longer pieces."""
ENCODED_BYTES = 1 << 17, 1 << 21
"""Fewest and most bytes of JSON lines in a piece that is tokenised beforehand: small, so that workers end together."""
GROUP_BYTES, GROUP_ROWS = 1 << 25, 1 << 16
"""Most bytes and rows of a parquet row group in a piece that is tokenised while it is read: a reader holds several."""
_SHARE = 16
"""Pieces that small sets are cut into, so that all workers have some; the pieces are the same on every machine."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 12
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a text or JSON lines file, row groups or record batches [start, stop) of a table.

    Attributes:
        ends: a text file's last piece; its document goes on in the next piece otherwise.
        first_row: of a part of one row group, where it begins.
        n_rows: of a part of one row group, its rows; None = the piece is no such part.
    """

    path: str
    kind: Kind
    start: int
    stop: int
    size: int
    ends: bool = True
    first_row: int = 0
    n_rows: int | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the piece before it is of the same row group, which can only be read from its start."""
        return self.first_row > 0


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: its number within the piece, from 0, and why."""

    row: int
    reason: str


def find_records(path: str) -> tuple[list[TextFile], Kind | None]:
    """The files of a data set, sorted by name, and their kind; "text" when none of them holds records.

    A directory is a `datasets` folder (`save_to_disk`) if it has a state.json, and its train split is taken if it has
    several. Other directories hold text, unless all files are JSON lines or any is a table.

    Raises:
        DataError: see `find_files`; several kinds of records are mixed, or the files are compressed.
    """
    expanded = Path(path).expanduser()
    if (expanded / "dataset_dict.json").is_file():
        names = json.loads((expanded / "dataset_dict.json").read_text()).get("splits", [])
        if "train" not in names:
            raise DataError(f"data path {path} has the splits {', '.join(names)}", "name one: data.path=FOLDER/SPLIT")
        path, expanded = str(expanded / "train"), expanded / "train"
    if (expanded / "state.json").is_file():
        path = str(expanded / "*.arrow")
    files = find_files(path)
    packed = next((f.name for f in files if f.name.endswith(_PACKED)), None)
    if packed is not None and (len(files) == 1 or all(f.name.endswith(_PACKED) for f in files)):
        raise DataError(f"data path {path} is compressed ({packed})", "decompress the files, or write parquet")
    alone = len(files) == 1 and not expanded.is_dir()
    records = [f for f in files if f.name.lower().endswith(RECORDS) or (alone and f.name.lower().endswith(".json"))]
    if not records or (len(records) < len(files) and not any(f.name.lower().endswith(TABLES) for f in records)):
        return files, None
    kinds = {_KINDS.get(os.path.splitext(f.name.lower())[1], "arrow"): f.name for f in records}
    if len(kinds) > 1:
        raise DataError(
            f"data path {path} mixes {' and '.join(kinds)} files ({', '.join(kinds.values())})",
            "name one kind by a glob such as data.path=DIR/*.parquet, or each kind as one of data.sources",
        )
    return records, next(iter(kinds))


def cut(
    files: list[TextFile], kind: Kind | None, n_bytes: int | None = None, split_groups: bool = False
) -> list[Piece]:
    """The pieces of all files, in order. Binary files among text are left out.

    Args:
        n_bytes: of text or JSON lines in a piece; None = `PIECE_BYTES`.
        split_groups: cut large row groups of parquet into parts, which must be read in order; see `PieceReader`.

    Raises:
        DataError: a file cannot be read, is cut short, or is an array of JSON instead of lines.
    """
    pieces: list[Piece] = []
    for file in files:
        try:
            pieces += _cut(file, kind or "text", n_bytes or PIECE_BYTES, split_groups)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise unreadable(file.path, error) from error
            raise damaged(file.path, error) from error  # pyarrow's errors have no number
    return pieces


def encoded_bytes(files: list[TextFile]) -> int:
    """Bytes of JSON lines in a piece that is tokenised beforehand."""
    least, most = ENCODED_BYTES
    return max(least, min(most, sum(file.size for file in files) // _SHARE))


def _cut(file: TextFile, kind: Kind, n_bytes: int, split_groups: bool) -> list[Piece]:
    if kind == "parquet":
        return _cut_groups(file, split_groups)
    if kind == "arrow":
        return _cut_batches(file)
    if kind == "text" and not is_text(file):
        return []
    if kind == "jsonl":
        refuse_array(file)
    cuts = [0]
    with open(file.path, "rb") as stream:
        while (at := cuts[-1] + n_bytes) < file.size:
            stream.seek(at)
            stream.readline()
            cuts.append(min(stream.tell(), file.size))
    if cuts[-1] != file.size or len(cuts) == 1:
        cuts.append(file.size)
    return [
        Piece(file.path, kind, start, stop, stop - start, ends=kind != "text" or stop == file.size)
        for start, stop in pairwise(cuts)
    ]


def _cut_groups(file: TextFile, split: bool) -> list[Piece]:
    pieces = []
    meta = parquet_file(file.path).metadata
    for i in range(meta.num_row_groups):
        n_rows, size = meta.row_group(i).num_rows, meta.row_group(i).total_byte_size
        n_parts = min(n_rows, max(-(-size // GROUP_BYTES), -(-n_rows // GROUP_ROWS))) if split else 1
        if n_parts < 2:
            pieces.append(Piece(file.path, "parquet", i, i + 1, size))
            continue
        for start, stop in pairwise(part * n_rows // n_parts for part in range(n_parts + 1)):
            n_bytes = size * (stop - start) // n_rows
            pieces.append(Piece(file.path, "parquet", i, i + 1, n_bytes, first_row=start, n_rows=stop - start))
    return pieces


def _cut_batches(file: TextFile) -> list[Piece]:
    pieces, start, size = [], 0, 0
    at = -1
    for at, batch in enumerate(arrow_batches(file.path)):
        size += batch.nbytes
        if size >= PIECE_BYTES:
            pieces.append(Piece(file.path, "arrow", start, at + 1, size))
            start, size = at + 1, 0
    return [*pieces, Piece(file.path, "arrow", start, at + 1, size)] if start <= at else pieces


def refuse_array(file: TextFile) -> None:
    with open(file.path, "rb") as stream:
        if stream.read(4096).lstrip()[:1] == b"[":
            raise DataError(
                f"{file.path} is one JSON array, not a JSON object on each line",
                "write an object a line: jq -c '.[]' FILE.json > FILE.jsonl",
            )


def rows(piece: Piece, columns: list[str] | None = None) -> Iterator[Any]:
    """The rows of a piece in order: a string (text: the whole piece), a dict, or a `BadRow`.

    Args:
        columns: of a table, the columns to read; None = all.

    Raises:
        DataError: the file cannot be read, or is damaged.
    """
    try:
        if piece.kind == "parquet":
            for batch in parquet_batches(piece.path, range(piece.start, piece.stop), columns):
                yield from to_dicts(batch)
        elif piece.kind == "arrow":
            for batch in islice(arrow_batches(piece.path, columns), piece.start, piece.stop):
                yield from to_dicts(batch)
        else:
            data = _bytes_of(piece)
            yield from _lines(data) if piece.kind == "jsonl" else _text(data)
    except OSError as error:
        raise damaged(piece.path, error) from error
    except ValueError as error:  # pyarrow's ArrowInvalid is one
        raise damaged(piece.path, error) from error


def _text(data: bytes) -> Iterator[Any]:
    try:
        yield data.decode("utf-8")
    except UnicodeDecodeError as error:
        yield BadRow(0, f"invalid UTF-8 at byte {error.start}")


def _lines(data: bytes) -> Iterator[Any]:
    for row, line in enumerate(io.BytesIO(data)):
        yield parse_line(row, line)


def parse_line(row: int, line: bytes) -> Any:
    """The object on a line of JSON, or why there is none; None for a blank line.

    Python's writers let numbers pass that are not finite. They make a bad row only where a column that is read holds
    them: `Columns.values` refuses them for every format.
    """
    if not line.strip():
        return None
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(row, f"invalid UTF-8 at byte {error.start} of the line")
    except RecursionError:
        return BadRow(row, "not JSON: nested too deeply")
    except ValueError as error:
        return BadRow(row, f"not JSON: {error}")
    return found if isinstance(found, dict) else BadRow(row, f"not a JSON object but {type(found).__name__}")


def survey(pieces: list[Piece]) -> tuple[list[int], str]:
    """The number of rows of each piece (blank lines are none), and a digest of the contents.

    JSON lines, which are read whole for it, are in the digest whole. Of a table's file it sees `_SAMPLES` blocks of
    `_SAMPLE_BYTES` at even distances, the first and the last bytes among them, and of parquet also the footer.

    Raises:
        DataError: a file cannot be read, or is damaged.
    """
    n_rows: list[int] = []
    digest = hashlib.blake2b(digest_size=16)
    path, meta = "", None
    for piece in pieces:
        try:
            if piece.kind == "jsonl":
                data = _bytes_of(piece)
                digest.update(data)
                n_rows.append(sum(1 for line in io.BytesIO(data) if line.strip()))
                continue
            if piece.path != path:
                path, meta = piece.path, parquet_file(piece.path).metadata if piece.kind == "parquet" else None
                digest.update(_samples(path, 0 if meta is None else meta.serialized_size + 8))  # its length, a mark
            if piece.n_rows is not None:
                n_rows.append(piece.n_rows)
            elif meta is not None:
                n_rows.append(sum(meta.row_group(i).num_rows for i in range(piece.start, piece.stop)))
            else:
                n_rows.append(sum(batch.num_rows for batch in islice(arrow_batches(path), piece.start, piece.stop)))
        except (OSError, ValueError) as error:
            raise damaged(piece.path, error) from error
    return n_rows, digest.hexdigest()


def _samples(path: str, tail: int) -> bytes:
    """Blocks of a file at even distances, and its last `tail` bytes."""
    found = []
    with open(path, "rb") as stream:
        room = max(0, os.fstat(stream.fileno()).st_size - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            stream.seek(number * room // (_SAMPLES - 1))
            found.append(stream.read(_SAMPLE_BYTES))
        stream.seek(-tail, os.SEEK_END)
        found.append(stream.read(tail))
    return b"".join(found)


def _bytes_of(piece: Piece) -> bytes:
    with open(piece.path, "rb") as stream:
        stream.seek(piece.start)
        return stream.read(piece.stop - piece.start)


def raw_rows(piece: Piece, columns: list[str] | None = None) -> Any:
    """The rows of a piece, not parsed yet: `row_at` gives one. Lines of bytes with their numbers, or an arrow table.

    Raises:
        DataError: the file cannot be read, or is damaged.
    """
    try:
        if piece.kind == "parquet":
            return to_table(list(parquet_batches(piece.path, range(piece.start, piece.stop), columns)), piece.path)
        if piece.kind == "arrow":
            return to_table(list(islice(arrow_batches(piece.path, columns), piece.start, piece.stop)), piece.path)
        return [(number, line) for number, line in enumerate(io.BytesIO(_bytes_of(piece))) if line.strip()]
    except (OSError, ValueError) as error:
        raise damaged(piece.path, error) from error


def row_at(raw: Any, index: int) -> tuple[int, Any]:
    """A row of `raw_rows`: its number within the piece, and a dict or a `BadRow`."""
    if isinstance(raw, list):
        number, line = raw[index]
        return number, parse_line(number, line)
    return index, to_dicts(raw.slice(index, 1))[0]


class PieceReader:
    """Gives the rows of any piece, and holds the last `window` pieces that it has read.

    Parts of a row group can only be read from the group's start on: asked for a part, it also holds those parts before
    it that are within the window, as an order that takes the group's parts window by window will ask for them.
    """

    def __init__(self, pieces: Sequence[Piece], columns: list[str], window: int) -> None:
        self._pieces, self._columns, self._window = pieces, columns, window
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._readers: OrderedDict[tuple[str, int], GroupReader] = OrderedDict()

    def row(self, number: int, index: int) -> tuple[int, Any]:
        """A row of a piece: its number within the piece, and a dict or a `BadRow`.

        Raises:
            DataError: the file cannot be read, or is damaged.
        """
        if number not in self._held:
            piece = self._pieces[number]
            if piece.n_rows is not None:
                self._read_parts(number)
            else:
                self._hold(number, raw_rows(piece, self._columns if piece.kind != "jsonl" else None))
        self._held.move_to_end(number)
        return row_at(self._held[number], index)

    def _hold(self, number: int, raw: Any) -> None:
        self._held[number] = raw
        if len(self._held) > self._window:
            self._held.popitem(last=False)

    def _read_parts(self, number: int) -> None:
        wanted = self._pieces[number]
        reader = self._readers.pop((wanted.path, wanted.start), None)
        if reader is None or reader.position > wanted.first_row:
            reader = GroupReader(wanted.path, wanted.start, self._columns)
        self._readers[wanted.path, wanted.start] = reader
        if len(self._readers) > self._window:
            self._readers.popitem(last=False)
        first = number
        while self._pieces[first].first_row > reader.position:
            first -= 1
        try:
            for part in range(first, number + 1):
                table = reader.read(self._pieces[part].n_rows or 0)
                if part > number - self._window:
                    self._hold(part, table)
        except (OSError, ValueError) as error:
            del self._readers[wanted.path, wanted.start]
            raise damaged(wanted.path, error) from error
