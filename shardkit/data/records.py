"""Rows of text, JSON lines, parquet and arrow files, and of `datasets` folders: found, cut into pieces, read.

A piece is a part of a file that one worker reads: a range of bytes (text, JSON lines), row groups (parquet) or record
batches (arrow). pyarrow is imported where it is used.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

from ..errors import DataError
from ..files import parse_json
from .sources import RECORDS, TABLES, TextFile, find_files, is_text, unreadable

Kind = Literal["text", "jsonl", "parquet", "arrow"]
PIECE_BYTES = 1 << 23
"""Bytes of text or JSON lines in a piece; longer lines make longer pieces."""
ENCODED_BYTES = 1 << 17, 1 << 21
"""Fewest and most bytes of JSON lines in a piece that is tokenised beforehand: small, so that workers end together."""
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
    """

    path: str
    kind: Kind
    start: int
    stop: int
    size: int
    ends: bool = True


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


def cut(files: list[TextFile], kind: Kind | None, n_bytes: int | None = None) -> list[Piece]:
    """The pieces of all files, in order. Binary files among text are left out.

    Args:
        n_bytes: of text or JSON lines in a piece; None = `PIECE_BYTES`.

    Raises:
        DataError: a file cannot be read, is cut short, or is an array of JSON instead of lines.
    """
    pieces: list[Piece] = []
    for file in files:
        try:
            pieces += _cut(file, kind or "text", n_bytes or PIECE_BYTES)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise unreadable(file.path, error) from error
            raise _damaged(file.path, error) from error  # pyarrow's errors have no number
    return pieces


def encoded_bytes(files: list[TextFile]) -> int:
    """Bytes of JSON lines in a piece that is tokenised beforehand."""
    least, most = ENCODED_BYTES
    return max(least, min(most, sum(file.size for file in files) // _SHARE))


def _cut(file: TextFile, kind: Kind, n_bytes: int) -> list[Piece]:
    if kind == "parquet":
        meta = parquet_file(file.path).metadata
        sizes = [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]
        return [Piece(file.path, kind, i, i + 1, size) for i, size in enumerate(sizes)]
    if kind == "arrow":
        return _cut_batches(file)
    if kind == "text" and not is_text(file):
        return []
    if kind == "jsonl":
        _refuse_array(file)
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


def _cut_batches(file: TextFile) -> list[Piece]:
    pieces, start, size = [], 0, 0
    at = -1
    for at, batch in enumerate(arrow_batches(file.path)):
        size += batch.nbytes
        if size >= PIECE_BYTES:
            pieces.append(Piece(file.path, "arrow", start, at + 1, size))
            start, size = at + 1, 0
    return [*pieces, Piece(file.path, "arrow", start, at + 1, size)] if start <= at else pieces


def _refuse_array(file: TextFile) -> None:
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
            groups = list(range(piece.start, piece.stop))
            for batch in parquet_file(piece.path).iter_batches(1024, row_groups=groups, columns=columns):
                yield from batch.to_pylist()
        elif piece.kind == "arrow":
            for batch in islice(arrow_batches(piece.path), piece.start, piece.stop):
                yield from (batch.select(columns) if columns else batch).to_pylist()
        else:
            data = _bytes_of(piece)
            yield from _lines(data) if piece.kind == "jsonl" else _text(data)
    except OSError as error:
        raise _damaged(piece.path, error) from error
    except ValueError as error:  # pyarrow's ArrowInvalid is one
        raise _damaged(piece.path, error) from error


def _text(data: bytes) -> Iterator[Any]:
    try:
        yield data.decode("utf-8")
    except UnicodeDecodeError as error:
        yield BadRow(0, f"invalid UTF-8 at byte {error.start}")


def _lines(data: bytes) -> Iterator[Any]:
    for row, line in enumerate(io.BytesIO(data)):
        yield parse_line(row, line)


def parse_line(row: int, line: bytes) -> Any:
    """The object on a line of JSON, or why there is none; None for a blank line."""
    if not line.strip():
        return None
    try:
        found = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(row, f"invalid UTF-8 at byte {error.start} of the line")
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
            if meta is not None:
                n_rows.append(sum(meta.row_group(i).num_rows for i in range(piece.start, piece.stop)))
            else:
                n_rows.append(sum(batch.num_rows for batch in islice(arrow_batches(path), piece.start, piece.stop)))
        except (OSError, ValueError) as error:
            raise _damaged(piece.path, error) from error
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
            return parquet_file(piece.path).read_row_groups(list(range(piece.start, piece.stop)), columns=columns)
        if piece.kind == "arrow":
            batches = list(islice(arrow_batches(piece.path), piece.start, piece.stop))
            table = _pyarrow("pyarrow", piece.path).Table.from_batches(batches)
            return table.select(columns) if columns else table
        return [(number, line) for number, line in enumerate(io.BytesIO(_bytes_of(piece))) if line.strip()]
    except (OSError, ValueError) as error:
        raise _damaged(piece.path, error) from error


def row_at(raw: Any, index: int) -> tuple[int, Any]:
    """A row of `raw_rows`: its number within the piece, and a dict or a `BadRow`."""
    if isinstance(raw, list):
        number, line = raw[index]
        return number, parse_line(number, line)
    return index, raw.slice(index, 1).to_pylist()[0]


def column_names(files: list[TextFile], kind: Kind) -> list[str]:
    """The columns of a set of records: of its first table, or of the first object of its first JSON lines.

    Raises:
        DataError: the first file holds no object.
    """
    path = files[0].path
    try:
        if kind == "parquet":
            return list(parquet_file(path).schema_arrow.names)
        if kind == "arrow":
            return list(next(iter(arrow_batches(path))).schema.names)
        _refuse_array(files[0])
        with open(path, "rb") as stream:
            for row, line in enumerate(stream):
                found = parse_line(row, line)
                if isinstance(found, dict):
                    return list(found)
    except StopIteration:
        return []
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    raise DataError(f"{path} has no line with a JSON object", "write one JSON object a line")


def parquet_file(path: str) -> Any:
    """An open parquet file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    parquet = _pyarrow("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def arrow_batches(path: str) -> Iterator[Any]:
    """The record batches of an arrow file: the stream that `datasets` writes, or the file format (feather)."""
    pyarrow = _pyarrow("pyarrow", path)
    with open(path, "rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    with pyarrow.memory_map(path) as source:
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(source)


def _pyarrow(module: str, path: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        cause = f"{path} needs pyarrow, which does not import: {error}"
        raise DataError(cause, "pip install shardkit[finetune]") from error


def _damaged(path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"{path} is damaged or cut short: {reason}", "copy or write the file again")
