"""Files and rows of data: the files that a path names, the pieces they are cut into, and the rows of a piece.

A format is a class with `columns`, `cut` and `rows`, named in `FORMATS`. pyarrow is imported where it is used.
"""

from __future__ import annotations

import codecs
import csv
import glob
import hashlib
import importlib
import io
import json
import mmap
import os
import re
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ..errors import LONGEST, DataError, importing, listed, one_line
from ..files import parse_json, read_regular

# Files, of any kind.

_SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages"}
_WILDCARDS = frozenset("*?[")
_SNIFFED_BYTES = 8192


@dataclass(frozen=True)
class TextFile:
    """A file of a corpus; `name` is its path relative to the corpus' root, with forward slashes."""

    path: str
    name: str
    size: int
    mtime_ns: int


def find_files(path: str) -> list[TextFile]:
    """A file, the files of a directory or those of a glob, sorted by relative path, without hidden and `.bin` files."""
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        files = [_stat(expanded, os.path.basename(expanded))]
        if not files[0].size:
            raise DataError(f"data path {path} is an empty file", "set data.path to text that is not empty")
    elif os.path.isdir(expanded):
        files = walk(expanded)
        weights = [file.name for file in files if file.name.endswith(".safetensors")]
        if weights and os.path.isfile(os.path.join(expanded, "config.json")):
            raise DataError(
                f"data path {path} is a model folder: it holds config.json and {weights[0]}",
                "set data.path to your text or records; a model folder belongs in model.init_from",
            )
    elif _WILDCARDS & set(expanded):
        parts = Path(expanded).parts
        fixed = next(i for i, part in enumerate(parts) if _WILDCARDS & set(part))
        root = os.path.join(*parts[:fixed]) if fixed else os.curdir
        files = _sorted_files(glob.glob(expanded, recursive=True), root)
    else:
        raise DataError(
            f"data path {path} does not exist",
            "set data.path to a file of text or records, a directory, a glob or a .bin file",
        )
    if not files:
        raise DataError(
            f"data path {path} holds no text files",
            "set data.path to a text file, a directory or a glob of text; token files are given one by one, as a .bin",
        )
    return files


def is_text(file: TextFile) -> bool:
    """Whether the first 8 KiB hold no zero byte (git's rule for telling text from binary)."""
    with reading(file.path), open(file.path, "rb") as stream:
        return b"\0" not in stream.read(_SNIFFED_BYTES)


def split_files(files: list[TextFile], val_fraction: float) -> tuple[list[TextFile], list[TextFile]]:
    """Training and validation files: a file validates when the hash of its name falls in the first `val_fraction`.

    A file stays in its part when others come or go. With two files or more, neither part is empty: the file with the
    smallest hash validates and the one with the largest trains. With `val_fraction` 0 all train.
    """
    val_names = held_out([file.name for file in files], val_fraction)
    return [f for f in files if f.name not in val_names], [f for f in files if f.name in val_names]


def held_out(names: list[str], val_fraction: float) -> set[str]:
    """The names of `split_files`' validation part."""
    if not val_fraction:
        return set()
    fractions = {}
    for name in names:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        fractions[name] = int.from_bytes(digest, "big") / 2**64
    ordered = sorted(names, key=lambda name: (fractions[name], name))
    n_val = sum(fraction < val_fraction for fraction in fractions.values())
    if len(names) > 1:
        n_val = min(max(n_val, 1), len(names) - 1)
    return set(ordered[:n_val])


SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split → the words that mean it in the names of files and folders, as in `datasets`."""
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_NUMBERED = re.compile(r"(.*-)(\d+)(-of-)(\d+)([^/]*)")


def splits_by_name(names: list[str]) -> dict[str, set[str]]:
    """Split → the files in it, by the rules of `datasets` (data_files.py); empty if no name means a split.

    The first rule that applies to any file decides: `data/SPLIT-00000-of-00001.*`, then words in the names of folders,
    then in those of files, where `-`, `.`, `_`, a space or a digit ends a word. Unlike there, case does not matter: the
    test data of `Train.jsonl` and `Test.jsonl` would be trained.
    """
    shards = {name: match[1] for name in names if (match := _SHARD.fullmatch(name))}
    if shards:
        splits: dict[str, set[str]] = {}
        for name, split in shards.items():
            split = next((s for s, words in SPLIT_WORDS.items() if split.lower() in words), split)
            splits.setdefault(split, set()).add(name)
        return splits
    for of_folder in (True, False):
        splits = {}
        for split, words in SPLIT_WORDS.items():
            end = "(?:[-._ 0-9].*)?" if of_folder else "[-._ 0-9].*"
            pattern = re.compile(f"(?:.*[-._ 0-9])?(?:{'|'.join(words)}){end}", re.IGNORECASE)
            for name in names:
                *folders, last = name.split("/")
                if any(pattern.fullmatch(part) for part in (folders if of_folder else [last])):
                    splits.setdefault(split, set()).add(name)
        if splits:
            return splits
    return {}


def _refuse_missing(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder that lacks some files of a set such as `train-00000-of-00003.parquet`."""
    sets: dict[tuple[str, ...], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        sets.setdefault((match[1], match[3], match[4], match[5]), set()).add(int(match[2]))
    for (start, of, total, end), numbers in sets.items():
        first = 1 if int(total) in numbers else 0  # data are counted from 0, weights from 1
        expected = [f"{start}{n:0{len(total)}}{of}{total}{end}" for n in range(first, first + int(total))]
        # The disk decides: files without content are left out of `names`.
        if lacking := [name for name in expected if not (folder / name).exists()]:
            raise DataError(
                f"data path {folder} lacks {listed(lacking)}: {len(numbers)} of {int(total)} such files are there",
                "copy the missing files, or name those to train on by a glob: data.path=FOLDER/*",
            )


def unreadable(path: str, error: OSError) -> DataError:
    """The error for a file or folder that the system refuses to read."""
    return DataError(f"{path} cannot be read: {error.strerror or error}", "check the path and its permissions")


def _stat(path: str, name: str) -> TextFile:
    with reading(path):
        status = os.stat(path)
    return TextFile(path, name.replace(os.sep, "/"), status.st_size, status.st_mtime_ns)


def _sorted_files(paths: Iterable[str], root: str) -> list[TextFile]:
    files = [_stat(path, os.path.relpath(path, root)) for path in paths if os.path.isfile(path)]
    return sorted((file for file in files if file.size and not file.name.endswith(".bin")), key=lambda file: file.name)


def walk(root: str) -> list[TextFile]:
    """All files below a folder, by relative path, without hidden, `.bin` and empty ones and installed packages."""

    def fail(error: OSError) -> None:
        raise unreadable(str(error.filename), error) from error

    paths: list[str] = []
    for directory, subdirectories, names in os.walk(root, onerror=fail):
        subdirectories[:] = [s for s in subdirectories if not s.startswith(".") and s not in _SKIPPED_DIRECTORIES]
        paths += [os.path.join(directory, name) for name in names if not name.startswith(".")]
    return _sorted_files(paths, root)


# Pieces and rows.


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, with the reason."""

    reason: str


@dataclass(frozen=True)
class Piece:
    """The part of a file that one worker reads: bytes, row groups, record batches or rows [start, stop)."""

    path: str
    format: RowFormat
    start: int
    stop: int
    size: int  # bytes of the piece
    starts: bool = True  # whether it is the first piece of its file
    ends: bool = True  # False for a piece of a text file whose document continues in the next piece
    first_row: int = 0  # the first row of a piece that is a part of one row group
    n_rows: int | None = None  # the rows of such a part; None for all other pieces


class RowFormat:
    """Reads one format of files with rows. Its instances have no state.

    Methods may raise any OSError and ValueError: `reading` turns these into a `DataError` that names the file.
    """

    name: ClassVar[str]  # the format's name in messages and in the keys of caches
    suffixes: ClassVar[tuple[str, ...]]  # suffixes of files in this format, in lower case
    has_columns: ClassVar[bool] = True  # False for plain text
    unit: ClassVar[str] = "row"  # the word for what a piece's `start` counts
    piece_bytes: ClassVar[int] = 1 << 23  # about how many bytes a piece has

    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        """The columns that any row has. A format that has to search the rows for them searches for these alone."""
        raise NotImplementedError

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        """The pieces of a file, in order; none if the file is to be skipped. The arguments are those of `cut`."""
        raise NotImplementedError

    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        """The rows in order: dicts, None for a blank line, a `BadRow`, or a string that is the whole piece.

        `columns` are the columns to read, of which the file may lack some; None = all.
        """
        raise NotImplementedError

    def encoded_piece_bytes(self, files: Sequence[TextFile]) -> int | None:
        """Bytes of a piece that is tokenised beforehand, where they differ from `piece_bytes`."""
        return None

    def load(self, piece: Piece, columns: list[str] | None) -> Sequence[tuple[int, Any]]:
        """All rows of the piece with their numbers in it, for access by index. Blank lines are left out."""
        return [(number, row) for number, row in enumerate(self.rows(piece, columns)) if row is not None]

    def survey(self, pieces: Sequence[Piece], digest: hashlib.blake2b) -> Iterator[int]:
        """The number of rows of each piece, blank lines left out; adds the contents to the digest on the way."""
        for piece in pieces:
            digest.update(_read_range(piece))
            yield len(self.load(piece, None))


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Errors of the system and of a format's library name the file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # pyarrow's
            raise damaged(path, error) from error
        raise unreadable(path, error) from error
    except (ValueError, csv.Error) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise damaged(path, error) from error


def damaged(path: str, error: Exception) -> DataError:
    """The error for a file that its format's library cannot read."""
    reason = one_line(error, LONGEST) or type(error).__name__
    return DataError(f"{path} is damaged or cut short: {reason}", "copy or write the file again")


# Text and JSON: a piece is a range of bytes that ends with a line.


def _line_pieces(file: TextFile, row_format: RowFormat, n_bytes: int) -> list[Piece]:
    """Pieces of about `n_bytes` that end with a line and cover the file; longer lines make longer pieces."""
    cuts = [0]
    with open(file.path, "rb") as stream:
        while (target := cuts[-1] + n_bytes) < file.size:
            stream.seek(target)
            stream.readline()
            cuts.append(min(stream.tell(), file.size))
    if cuts[-1] != file.size or len(cuts) == 1:
        cuts.append(file.size)
    return [Piece(file.path, row_format, start, stop, stop - start) for start, stop in pairwise(cuts)]


def _read_range(piece: Piece) -> bytes:
    with open(piece.path, "rb") as stream:
        stream.seek(piece.start)
        return stream.read(piece.stop - piece.start)


class PlainText(RowFormat):
    """Text files, a document each, which may span several pieces. Binary ones among them are skipped."""

    name, suffixes, has_columns, unit = "text", (), False, "byte"

    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        return []

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        pieces = _line_pieces(file, self, n_bytes) if is_text(file) else []
        return [replace(piece, ends=piece.stop == file.size) for piece in pieces]

    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        try:
            yield _read_range(piece).decode("utf-8")
        except UnicodeDecodeError as error:
            yield BadRow(f"invalid UTF-8 at byte {error.start}")


class Json(RowFormat):
    """A JSON object on each line, where blank lines are skipped, or (`.json`) one array of objects.

    Each row is parsed by itself with Python's `json`: Arrow would give all rows one type, and lose their numbers.
    """

    name, suffixes, unit = "jsonl", (".jsonl", ".ndjson", ".json"), "byte"
    encoded_bytes: ClassVar[tuple[int, int]] = 1 << 17, 1 << 21
    """Fewest and most bytes of a piece that is tokenised beforehand: small, so that all workers end together."""
    encoded_pieces: ClassVar[int] = 16
    """Pieces of a small set, so that every worker has some. The number of workers must not change the pieces, because
    the data digest in checkpoints is taken piece by piece."""

    def encoded_piece_bytes(self, files: Sequence[TextFile]) -> int | None:
        fewest, most = self.encoded_bytes
        return max(fewest, min(most, sum(file.size for file in files) // self.encoded_pieces))

    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        """All columns of the first object, and those of `candidates` that any other object has."""
        names: list[str] = []
        for file in files:
            if json_layout(file) == "array":
                rows = self.rows(Piece(file.path, self, 0, file.size, file.size), None)
                with reading(file.path):
                    names += dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
            else:
                with (
                    reading(file.path),
                    open(file.path, "rb") as stream,
                    mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
                ):
                    _scan(content, candidates, names)
            if not names:
                with open(file.path, "rb") as stream:
                    first = _parse_line(stream.readline(1 << 20))
                reason = f", the first is {first.reason}" if isinstance(first, BadRow) else ""
                as_utf8 = "save it as UTF-8, with" if "invalid UTF-8" in reason else "write"
                raise DataError(
                    f"{file.path} has no line with a JSON object{reason}", f"{as_utf8} one JSON object a line"
                )
        return list(dict.fromkeys(names))

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        if json_layout(file) == "array":
            return [Piece(file.path, self, 0, file.size, file.size)]
        return _line_pieces(file, self, n_bytes)

    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        content = _read_range(piece)
        if _is_array(piece, content):
            for row in _parse(content, "the file"):
                yield row if isinstance(row, dict) else BadRow(f"not a JSON object but {type(row).__name__}")
            return
        for line in io.BytesIO(content):
            yield _parse_line(line)

    def load(self, piece: Piece, columns: list[str] | None) -> Sequence[tuple[int, Any]]:
        content = _read_range(piece)
        if _is_array(piece, content):
            return list(enumerate(self.rows(piece, columns)))
        return _Lines((n, line) for n, line in enumerate(io.BytesIO(content)) if line.strip())


class _Lines(list[tuple[int, Any]]):
    """Lines that are parsed when they are asked for: parsed rows would take several times the memory."""

    def __getitem__(self, index: Any) -> Any:
        number, line = super().__getitem__(index)
        return number, _parse_line(line)


def _is_json(path: str) -> bool:
    return path.lower().endswith(".json")


def _is_array(piece: Piece, content: bytes) -> bool:
    return piece.starts and content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[" and _is_json(piece.path)


def _parse(content: bytes, where: str) -> Any:
    """Parse JSON in UTF-8, which editors on Windows begin with a mark. Numbers that are not finite pass here: they make
    a bad row only in a column that is read (`Columns.values`).
    """
    try:
        return json.loads(content.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start} of {where}") from error
    except RecursionError as error:
        raise ValueError("not JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _parse_line(line: bytes) -> Any:
    """The object on a line of JSON, a `BadRow`, or None for a blank line."""
    if not line.strip():
        return None
    try:
        parsed = _parse(line, "the line")
    except ValueError as error:
        return BadRow(str(error))
    return parsed if isinstance(parsed, dict) else BadRow(f"not a JSON object but {type(parsed).__name__}")


_COLUMNS_OF_ROWS = {"messages", "conversations", "prompt", "instruction", "text"}


def json_layout(file: TextFile) -> str:
    """Whether a file of JSON has a row on each of its "lines" or is one "array" of rows."""
    with open(file.path, "rb") as stream:
        head = stream.read(4096)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(
                f"{file.path} is UTF-16 text, not UTF-8", "save it as UTF-8: iconv -f utf-16 -t utf-8 FILE > NEW.jsonl"
            )
        first = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if first == b"[" and _is_json(file.path):
            return "array"
        if first == b"[":
            raise DataError(
                f"{file.path} is one JSON array, not a JSON object on each line",
                "write an object a line: jq -c '.[]' FILE.json > FILE.jsonl",
            )
        if _is_json(file.path) and (single := _single_object(file)) is not None:
            by_key = ".[]" if single and all(isinstance(value, dict) for value in single.values()) else "."
            raise DataError(
                f"{file.path} is one JSON object, not an object on each line or an array of objects",
                f"write an object a line: jq -c '{nested_rows(single) or by_key}' FILE.json > FILE.jsonl",
            )
    return "lines"


def _single_object(file: TextFile) -> dict[str, Any] | None:
    """The object that a `.json` file spreads over several lines; None for a file of lines."""
    with open(file.path, "rb") as stream:
        if isinstance(_parse_line(next((line for line in stream if line.strip()), b"")), dict):
            return None
        stream.seek(0)
        try:
            parsed = _parse(stream.read(), "the file")
        except ValueError:
            return None  # its lines are bad rows, each named by its number
    return parsed if isinstance(parsed, dict) else None


def nested_rows(row: dict[str, Any]) -> str:
    """The path of jq to the rows that a list within this object holds, such as `.rows[].row`; empty if none does."""
    for name, value in row.items():
        is_list = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
        if is_list and not any({"role", "from"} & item.keys() for item in value):  # turns are no rows
            key = f".{name}" if re.fullmatch(r"[A-Za-z_]\w*", name) else f".[{json.dumps(name)}]"
            wrapped = all(isinstance(item.get("row"), dict) for item in value)
            return f"{key}[]" + (".row" if wrapped else "")
    return ""


def _scan(content: mmap.mmap, candidates: set[str], names: list[str]) -> None:
    """Add to `names` the candidates among the columns of these lines; all columns of the first object if it is empty.

    Only lines where the quoted name occurs are parsed, which makes this as fast as reading the file.
    """
    position = 0
    while position < len(content) and (missing := candidates.difference(names)):
        if names:
            pattern = rb"\{"  # any object, if a name has several spellings in JSON
            if all(re.fullmatch(r"[\w .-]+", name, re.ASCII) for name in missing):
                pattern = b'"(?:' + b"|".join(re.escape(name.encode()) for name in sorted(missing)) + b')"\\s*:'
            match = re.compile(pattern).search(content, position)
            if match is None:
                return
            position = match.start()
        start = content.rfind(b"\n", 0, position) + 1
        stop = content.find(b"\n", position)
        stop = len(content) if stop < 0 else stop + 1
        row = _parse_line(content[start:stop])
        if isinstance(row, dict):
            names += [name for name in row if name in missing] if names else list(row)
        position = stop


class Csv(RowFormat):
    """Comma- or tab-separated values with a header; each value is text. A file is one piece.

    Python's reader, because pandas (under `load_dataset`) makes 7 of "007", null of "NA", and shifts the columns of
    rows that have a field too many.
    """

    name, suffixes = "csv", (".csv", ".tsv")

    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        names: dict[str, None] = {}
        for file in files:
            with reading(file.path), open(file.path, encoding="utf-8-sig", newline="") as stream:
                header = next(self._fields(file.path, stream), [])
            if twice := next((name for name in header if header.count(name) > 1), None):
                raise DataError(f"{file.path} has two columns named {twice!r}", "give each column a name of its own")
            names.update(dict.fromkeys(header))
        return list(names)

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        return [Piece(file.path, self, 0, file.size, file.size)]

    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        with open(piece.path, encoding="utf-8-sig", newline="") as stream:
            fields = self._fields(piece.path, stream)
            header = next(fields)
            for values in fields:
                if not values:
                    yield None
                elif len(values) != len(header):
                    yield BadRow(f"{len(values)} fields, and the header has {len(header)}")
                else:
                    yield dict(zip(header, values, strict=True))

    @staticmethod
    def _fields(path: str, stream: io.TextIOWrapper) -> Iterator[list[str]]:
        csv.field_size_limit(sys.maxsize)  # 131,072 characters by default, fewer than a long conversation
        return csv.reader(stream, delimiter="\t" if path.lower().endswith(".tsv") else ",", strict=True)


class Table(RowFormat):
    """The common part of parquet and arrow, whose rows pyarrow reads as record batches.

    `datasets` would read them through a copy of all rows on the disk, without maps, and without files that lack a
    column of the others; and checkpoints hold digests of row groups.
    """

    unit = "group"
    samples: ClassVar[tuple[int, int]] = 16, 1 << 12
    """Blocks of a file that its digest covers, and their bytes."""

    def schema(self, path: str) -> Any:
        raise NotImplementedError

    def batches(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        raise NotImplementedError

    def count_rows(self, path: str, pieces: Sequence[Piece]) -> list[int]:
        """The number of rows of each of a file's pieces."""
        raise NotImplementedError

    def footer_bytes(self, path: str) -> int:
        """Bytes at the end of a file that are added to the digest in full."""
        return 0

    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        return list(dict.fromkeys(name for file in files for name in self.schema(file.path).names))

    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        for batch in self.batches(piece, columns):
            yield from _to_dicts(batch)

    def load(self, piece: Piece, columns: list[str] | None) -> Sequence[tuple[int, Any]]:
        return _TableRows(list(self.batches(piece, columns)), piece.path)

    def survey(self, pieces: Sequence[Piece], digest: hashlib.blake2b) -> Iterator[int]:
        """The digest gets blocks of each file at even distances, its first and last bytes too, and its footer."""
        n_blocks, n_bytes = self.samples
        for path, of_file in groupby(pieces, key=lambda piece: piece.path):
            footer = self.footer_bytes(path)
            with open(path, "rb") as stream:
                last_start = max(0, os.fstat(stream.fileno()).st_size - n_bytes)
                for number in range(n_blocks):
                    stream.seek(number * last_start // (n_blocks - 1))
                    digest.update(stream.read(n_bytes))
                stream.seek(-footer, os.SEEK_END)
                digest.update(stream.read(footer))
            yield from self.count_rows(path, list(of_file))


class _TableRows(Sequence[tuple[int, Any]]):
    """Record batches of one schema, converted row by row: rows of Python take several times the memory."""

    def __init__(self, batches: list[Any], path: str) -> None:
        self._table = _pyarrow("pyarrow", path).Table.from_batches(batches)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return index, _to_dicts(self._table.slice(index, 1))[0]


def _to_dicts(rows: Any) -> list[dict[str, Any]]:
    """The rows of a batch or table as dicts; maps become dicts too, as objects of JSON do."""
    if any("map<" in str(kind) for kind in rows.schema.types):
        dicts: list[dict[str, Any]] = rows.to_pylist(maps_as_pydicts="strict")
        return dicts
    return rows.to_pylist()  # type: ignore[no-any-return]


def _pyarrow(module: str, path: str) -> Any:
    """A module of pyarrow, which `datasets` brings."""
    with importing(f"{path} needs pyarrow", "pip install shardkit[finetune]", DataError):
        return importlib.import_module(module)


class Parquet(Table):
    """A piece is one row group, or a part of a large one."""

    name, suffixes = "parquet", (".parquet",)
    part_bytes: ClassVar[int] = 1 << 25
    part_rows: ClassVar[int] = 1 << 16
    """Most bytes and rows of a part of a row group, as a reader holds several parts."""
    batch_rows, batch_bytes = 1024, 1 << 22
    """Most rows that are decoded together, and about how many bytes."""

    def open(self, path: str) -> Any:
        parquet = _pyarrow("pyarrow.parquet", path)
        with reading(path):
            # Without a buffer pyarrow reads a whole column of a row group at once, however few rows are asked for.
            return parquet.ParquetFile(path, buffer_size=1 << 18, pre_buffer=False)

    def schema(self, path: str) -> Any:
        return self.open(path).schema_arrow

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        pieces = []
        metadata = self.open(file.path).metadata
        for i in range(metadata.num_row_groups):
            n_rows, size = metadata.row_group(i).num_rows, metadata.row_group(i).total_byte_size
            n_parts = min(n_rows, max(-(-size // self.part_bytes), -(-n_rows // self.part_rows))) if split_groups else 1
            if n_parts < 2:
                pieces.append(Piece(file.path, self, i, i + 1, size))
                continue
            for start, stop in pairwise(part * n_rows // n_parts for part in range(n_parts + 1)):
                part_size = size * (stop - start) // n_rows
                pieces.append(Piece(file.path, self, i, i + 1, part_size, first_row=start, n_rows=stop - start))
        return pieces

    def batches(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        """The rows of the piece's row group in small batches; memory does not grow with the group."""
        file = self.open(piece.path)
        group = file.metadata.row_group(piece.start)
        n_rows = max(1, min(self.batch_rows, self.batch_bytes * group.num_rows // max(group.total_byte_size, 1)))
        selected = columns and [name for name in columns if name in file.schema_arrow.names]
        yield from file.iter_batches(n_rows, row_groups=[piece.start], columns=selected, use_threads=False)

    def count_rows(self, path: str, pieces: Sequence[Piece]) -> list[int]:
        metadata = self.open(path).metadata
        return [metadata.row_group(piece.start).num_rows if piece.n_rows is None else piece.n_rows for piece in pieces]

    def footer_bytes(self, path: str) -> int:
        return int(self.open(path).metadata.serialized_size) + 8  # with the footer's length and the magic number


class Arrow(Table):
    """The stream that `datasets` writes, and the file format (feather). A piece is some record batches."""

    name, suffixes = "arrow", (".arrow", ".feather")

    def schema(self, path: str) -> Any:
        pyarrow = _pyarrow("pyarrow", path)
        with reading(path), pyarrow.memory_map(path) as source:
            return self._reader(pyarrow, path, source)[0].schema

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        pieces, start, size, n_batches = [], 0, 0, 0
        for batch in self._all_batches(file.path):
            n_batches += 1
            size += batch.nbytes
            if size >= self.piece_bytes:
                pieces.append(Piece(file.path, self, start, n_batches, size))
                start, size = n_batches, 0
        return [*pieces, Piece(file.path, self, start, n_batches, size)] if start < n_batches else pieces

    def batches(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        yield from islice(self._all_batches(piece.path, columns), piece.start, piece.stop)

    def count_rows(self, path: str, pieces: Sequence[Piece]) -> list[int]:
        batch_rows = [batch.num_rows for batch in self._all_batches(path)]
        return [sum(batch_rows[piece.start : piece.stop]) for piece in pieces]

    def _all_batches(self, path: str, columns: list[str] | None = None) -> Iterator[Any]:
        pyarrow = _pyarrow("pyarrow", path)
        with pyarrow.memory_map(path) as source:
            reader, batches = self._reader(pyarrow, path, source)
            selected = columns and [name for name in columns if name in reader.schema.names]
            for batch in batches:
                batch = batch if selected is None else batch.select(selected)
                batch.validate(full=True)  # pyarrow follows damaged offsets beyond the file otherwise
                yield batch

    @staticmethod
    def _reader(pyarrow: Any, path: str, source: Any) -> tuple[Any, Iterator[Any]]:
        with open(path, "rb") as stream:
            is_file = stream.read(6) == b"ARROW1"
        if not is_file:
            reader = pyarrow.ipc.open_stream(source)
            return reader, iter(reader)
        reader = pyarrow.ipc.open_file(source)
        return reader, (reader.get_batch(i) for i in range(reader.num_record_batches))


PLAIN_TEXT: RowFormat = PlainText()
FORMATS: tuple[RowFormat, ...] = (Json(), Parquet(), Arrow(), Csv())
"""All formats of records: a new one is a class, and a name here."""


# The files of a path.

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4")
_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
"""Files of JSON that describe a data set."""
_CARDS = re.compile(
    r"(readme|licen[cs]e|notice|copying|changelog|citation|authors|contribut\w*|datasheet|requirements|makefile|"
    r"dockerfile|version|sha\d+sums?|md5sums?)\b.*|[^.]+|.*\.(md|rst|cff|bib|ya?ml|toml|lock|sha\d+|md5|log|"
    r"svg|png|jpe?g|gif|webp|bmp|ico|pdf)",
    re.IGNORECASE,
)
_SCRIPTS = (".py", ".sh", ".ipynb")


def format_of(name: str) -> RowFormat | None:
    """The format of a file of records, by its name; None for any other file."""
    lower = name.lower()
    return next((row_format for row_format in FORMATS if lower.endswith(row_format.suffixes)), None)


@dataclass(frozen=True)
class Found:
    """The files of a data set, of one format."""

    path: str  # as it was given
    format: RowFormat
    splits: dict[str, list[TextFile]]  # split → its files, sorted by name; "train" alone where nothing names splits
    left_out: list[str] = field(default_factory=list)  # names of files beside the data

    @property
    def train(self) -> list[TextFile]:
        """The training files."""
        if "train" not in self.splits:
            examples = "; ".join(f"{split}: {listed([f.name for f in files])}" for split, files in self.splits.items())
            of_no_split = [
                name for name in self.left_out if os.path.basename(name) not in _METADATA and format_of(name)
            ]
            beside = f"; of no split: {listed(of_no_split)}" if of_no_split else ""
            raise DataError(
                f"data path {self.path} has no training split ({examples}{beside})",
                "name the files to train on: data.path=FOLDER/NAME, or a glob of them",
            )
        return self.splits["train"]


def find(path: str) -> Found:
    """The files of a data set, by what they are and which split their names put them into, as `datasets` does it.

    A file or a glob is taken as it is. In a folder, files beside records are no data; a folder without records holds
    text.
    """
    expanded = Path(path).expanduser()
    if (expanded / "dataset_dict.json").is_file() or (expanded / "state.json").is_file():
        return _saved(path, expanded)
    files = find_files(path)
    of_format: dict[str, list[TextFile]] = {}
    others: list[TextFile] = []
    compressed: list[TextFile] = []
    for file in files:
        name = os.path.basename(file.name).lower()
        row_format = None if name in _METADATA and len(files) > 1 else format_of(name)
        if row_format is not None:
            of_format.setdefault(row_format.name, []).append(file)
        else:
            bare = name.removesuffix(Path(name).suffix)
            is_compressed = name.endswith(_COMPRESSED) and (len(files) == 1 or format_of(bare) or bare.endswith(".txt"))
            (compressed if is_compressed else others).append(file)
    if compressed or (not of_format and all(file.name.lower().endswith(_COMPRESSED) for file in files)):
        name = (compressed or files)[0].name
        raise DataError(f"data path {path} is compressed ({name})", "decompress the files, or write parquet")
    if len(of_format) > 1:
        examples = {name: members[0].name for name, members in of_format.items()}
        raise DataError(
            f"data path {path} mixes {' and '.join(examples)} files ({', '.join(examples.values())})",
            "name one kind by a glob such as data.path=DIR/*.parquet, or each kind as one of data.sources",
        )
    if not of_format:
        return _texts(path, expanded, files)
    [(name, records)] = of_format.items()
    row_format = next(row_format for row_format in FORMATS if row_format.name == name)
    if name == "jsonl" and len(records) > 1:  # metrics or settings in one object lie beside rows, too
        of_splits = {name for names in splits_by_name([file.name for file in records]).values() for name in names}
        metadata = []
        for file in records:
            single = _single_object(file) if _is_json(file.path) and file.name not in of_splits else None
            if single is not None and not nested_rows(single) and not single.keys() & _COLUMNS_OF_ROWS:
                metadata.append(file)
        if 0 < len(metadata) < len(records):
            records, others = [file for file in records if file not in metadata], [*others, *metadata]
    scripts = [file for file in others if file.name.lower().endswith(_SCRIPTS)]
    texts = [file for file in others if not _CARDS.fullmatch(os.path.basename(file.name)) and file not in scripts]
    texts = [file for file in texts if not _is_json(file.path) and is_text(file)]
    if len(scripts) > max(len(records), 2):
        texts += scripts
    if texts:  # no card or licence of the records: nobody knows which of the two is meant
        raise DataError(
            f"data path {path} mixes records ({listed([file.name for file in records])}) and text "
            f"({listed([file.name for file in texts])})",
            "name one kind by a glob such as data.path=DIR/*.jsonl, or each kind as one of data.sources",
        )
    splits, of_no_split = {"train": records}, list[TextFile]()
    if expanded.is_dir():
        splits, of_no_split = _splits(expanded, records)
    left_out = sorted(file.name for file in (*others, *of_no_split))
    return Found(path, row_format, splits, left_out)


def _saved(path: str, folder: Path) -> Found:
    """The files of a folder that `datasets` wrote with `save_to_disk`."""
    listing = folder / "dataset_dict.json"
    parts = {"train": folder}
    if listing.is_file():
        try:
            parts = {str(split): folder / str(split) for split in parse_json(read_regular(listing))["splits"]}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{listing} is damaged: {error}", "name a split: data.path=FOLDER/SPLIT") from error
    splits: dict[str, list[TextFile]] = {}
    for split, part in parts.items():
        name = next((n for n, words in SPLIT_WORDS.items() if split in words), split)
        try:
            described = parse_json(read_regular(part / "state.json"))["_data_files"]
            wanted = {str(item["filename"]) for item in described}
        except (OSError, ValueError, LookupError, TypeError):
            wanted = set()  # then all of its tables, of which `map` may have left some
        if split == "train" or part.is_dir():
            files = find_files(str(Path(glob.escape(str(part))) / "*.arrow"))
            splits[name] = [file for file in files if not wanted or file.name in wanted]
            _refuse_missing(part, [file.name for file in splits[name]])
    return Found(path, next(f for f in FORMATS if f.name == "arrow"), splits)


def _texts(path: str, folder: Path, files: list[TextFile]) -> Found:
    """Files of text. Only where all of a folder's `.txt` are of a split, names like `train.txt` mean one."""
    if folder.is_dir():
        _refuse_missing(folder, [file.name for file in files])
        texts = [file for file in files if not _CARDS.fullmatch(os.path.basename(file.name))]
        splits = splits_by_name([file.name for file in texts])
        named = {name for names in splits.values() for name in names}
        if "train" in splits and all(file.name.endswith(".txt") and file.name in named for file in texts):
            of_split = {split: [file for file in texts if file.name in names] for split, names in splits.items()}
            return Found(path, PLAIN_TEXT, of_split, sorted({f.name for f in files} - named))
    return Found(path, PLAIN_TEXT, {"train": files})


def _splits(folder: Path, records: list[TextFile]) -> tuple[dict[str, list[TextFile]], list[TextFile]]:
    """The files of each split, by the folder's card or else by their names, and those of no split."""
    names = [file.name for file in records]
    by_split = _card_splits(folder)
    if not by_split:  # a card may choose some files of a set
        _refuse_missing(folder, names)
        by_split = splits_by_name(names)
    if not by_split:
        return {"train": records}, []
    splits = {split: [file for file in records if file.name in chosen] for split, chosen in by_split.items()}
    splits = {split: files for split, files in splits.items() if files}
    taken = [file.name for files in splits.values() for file in files]
    if twice := next((name for name in taken if taken.count(name) > 1), None):
        several = [split for split, files in splits.items() if any(file.name == twice for file in files)]
        raise DataError(
            f"data path {folder}: {twice} is of the splits {' and '.join(several)} by its name",
            "name the files to train on by data.path, and the validation data by data.val_path",
        )
    return splits, [file for file in records if file.name not in taken]


def _card_splits(folder: Path) -> dict[str, set[str]]:
    """Split → names of files, by the card of a hub's data set (`configs` in README.md); empty if it names none."""
    card = folder / "README.md"
    head = re.match(r"\A---\n(.*?)\n---", card.read_text("utf-8", "replace"), re.DOTALL) if card.is_file() else None
    try:
        about = yaml.safe_load(head[1]) if head else None
    except (yaml.YAMLError, RecursionError):
        return {}
    configs = about.get("configs") if isinstance(about, dict) else None
    configs = [c for c in configs if isinstance(c, dict) and "data_files" in c] if isinstance(configs, list) else []
    if not configs:
        return {}
    default = [c for c in configs if len(configs) == 1 or c.get("default") is True or c.get("config_name") == "default"]
    if not default:
        sets = listed([str(config.get("config_name")) for config in configs])
        raise DataError(
            f"data path {folder} holds several data sets ({sets})", "name the files of one by a glob: data.path=DIR/*"
        )
    files = default[0]["data_files"]
    if isinstance(files, dict):
        files = [{"split": split, "path": patterns} for split, patterns in files.items()]
    entries = [e if isinstance(e, dict) else {"path": e} for e in (files if isinstance(files, list) else [files])]
    splits: dict[str, set[str]] = {}
    for entry in entries:
        patterns = entry.get("path")
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            matches = glob.glob(str(pattern), root_dir=folder, recursive=True)
            name = str(entry.get("split", "train"))
            name = next((split for split, words in SPLIT_WORDS.items() if name in words), name)
            splits.setdefault(name, set()).update(match.replace(os.sep, "/") for match in matches)
    return splits


def find_text_files(path: str | None, split: str = "train") -> list[TextFile]:
    """Candidate files of a text corpus, sorted by relative path: a file, a directory's files, or a glob's.

    None means the source of Python's standard library. Hidden files and `.bin` files are left out; `is_text` decides
    whether a file really is text when it is read.
    """
    if path is None:
        root = sysconfig.get_path("stdlib")
        files = [file for file in walk(root) if file.name.endswith(".py")]
        if not files:
            raise DataError(
                f"this Python has no source files of its library in {root}", "set data.path to text of your own"
            )
        return files
    found = find(path)
    if found.format.has_columns:  # their bytes would be trained, with quotes and names of columns
        first = next(file.name for files in found.splits.values() for file in files)
        raise DataError(
            f"data path {path} holds records, not text ({first}), and the run has no tokenizer to read them with",
            "set data.tokenizer to a tokenizer.json or its folder, or write the token ids to a .bin file",
        )
    return found.train if split == "train" else found.splits.get(split, [])


def cut(
    files: Sequence[TextFile], row_format: RowFormat, n_bytes: int | None = None, split_groups: bool = False
) -> list[Piece]:
    """The pieces of all files, in order. Binary files among text are left out.

    `n_bytes`: bytes of a piece of text or JSON lines; None = the format's usual. `split_groups`: cut large row groups
    of parquet into parts, which must be read in order; see `PieceReader`.
    """
    pieces: list[Piece] = []
    for file in files:
        with reading(file.path):
            of_file = row_format.cut(file, n_bytes or row_format.piece_bytes, split_groups)
        pieces += [replace(piece, starts=number == 0) for number, piece in enumerate(of_file)]
    return pieces


def survey(pieces: Sequence[Piece]) -> tuple[list[int], str]:
    """The number of rows of each piece (blank lines are none), and a digest of the contents.

    The digest covers all of JSON and csv, which are read for it anyway. Of a table's file it covers blocks at even
    distances, the first and the last bytes among them, and of parquet also the footer.
    """
    digest = hashlib.blake2b(digest_size=16)
    n_rows: list[int] = []
    if pieces:
        counts = pieces[0].format.survey(pieces, digest)
        while len(n_rows) < len(pieces):
            with reading(pieces[len(n_rows)].path):
                n_rows.append(next(counts))
    return n_rows, digest.hexdigest()


class PieceReader:
    """Gives the rows of any piece, and holds the last `window` pieces that it has read.

    Parts of a row group can only be read from the group's start on. When a part is read, the parts before it that are
    within the window are held as well: an order that takes the group's parts window by window will ask for them.
    """

    def __init__(self, pieces: Sequence[Piece], columns: list[str], window: int) -> None:
        self._pieces, self._columns, self._window = pieces, columns, window
        self._loaded: OrderedDict[int, Sequence[tuple[int, Any]]] = OrderedDict()
        self._groups: OrderedDict[tuple[str, int], _GroupReader] = OrderedDict()

    def row(self, number: int, index: int) -> tuple[int, Any]:
        """A row of a piece: its number within the piece, and a dict or a `BadRow`."""
        piece = self._pieces[number]
        with reading(piece.path):
            if number not in self._loaded:
                if piece.n_rows is not None:
                    self._load_parts(number)
                else:
                    self._hold(number, piece.format.load(piece, self._columns))
            self._loaded.move_to_end(number)
            return self._loaded[number][index]

    def _hold(self, number: int, loaded: Sequence[tuple[int, Any]]) -> None:
        self._loaded[number] = loaded
        if len(self._loaded) > self._window:
            self._loaded.popitem(last=False)

    def _load_parts(self, number: int) -> None:
        """Read the part `number` of a row group, and the parts before it that its reader has not passed yet."""
        part = self._pieces[number]
        reader = self._groups.pop((part.path, part.start), None)
        if reader is None or reader.position > part.first_row:
            reader = _GroupReader(part, self._columns)
        next_number = number
        while self._pieces[next_number].first_row > reader.position:
            next_number -= 1
        for passed in range(next_number, number + 1):
            loaded = reader.read(self._pieces[passed].n_rows or 0)
            if passed > number - self._window:
                self._hold(passed, loaded)
        self._groups[part.path, part.start] = reader
        if len(self._groups) > self._window:
            self._groups.popitem(last=False)


class _GroupReader:
    """Reads a row group from its start to its end, in parts of any number of rows; `position` counts the rows read."""

    def __init__(self, piece: Piece, columns: list[str] | None) -> None:
        assert isinstance(piece.format, Table)
        self.path, self.position = piece.path, 0
        self._batches = piece.format.batches(piece, columns)
        self._remainder: Any = None

    def read(self, n_rows: int) -> _TableRows:
        parts, missing = [], n_rows
        while missing:
            batch = self._remainder if self._remainder is not None else next(self._batches, None)
            if batch is None:
                raise ValueError(f"a row group has no more than {self.position} rows")
            parts.append(batch.slice(0, missing))
            self._remainder = batch.slice(missing) if batch.num_rows > missing else None
            missing -= parts[-1].num_rows
        self.position += n_rows
        return _TableRows(parts, self.path)
