"""The row formats, and the files of a data set with their format."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from ...errors import DataError
from ...files import parse_json, read_regular
from ..listing import TextFile, find_files, walk
from .arrow import Arrow
from .format import RowFormat
from .jsonl import JsonLines
from .parquet import Parquet
from .plain_text import PlainText

PLAIN_TEXT: RowFormat = PlainText()
FORMATS: tuple[RowFormat, ...] = (JsonLines(), Parquet(), Arrow())
"""All formats of records: a new one is a module and a name here."""
RECORDS = tuple(suffix for row_format in FORMATS for suffix in row_format.suffixes)
"""Suffixes of files that hold records."""
RECORDS_ALONE = (*RECORDS, *(suffix for row_format in FORMATS for suffix in row_format.suffixes_alone))
"""Suffixes of a file that holds records, if it is named by itself."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")


def find_records(path: str) -> tuple[list[TextFile], RowFormat]:
    """The files of a data set, sorted by name, and their format; `PLAIN_TEXT` when none of them holds records.

    A directory is a `datasets` folder (`save_to_disk`) if it has a state.json, and its train split is taken if it has
    several. Other directories hold text, unless all files are JSON lines or any is a table.

    Raises:
        DataError: see `find_files`; several formats of records are mixed, or the files are compressed.
    """
    path = _datasets_split(path)
    expanded = Path(path).expanduser()
    if (expanded / "state.json").is_file():
        path = str(expanded / "*.arrow")
    files = find_files(path)
    compressed = [file.name for file in files if file.name.endswith(_COMPRESSED)]
    if compressed and len(compressed) == len(files):
        raise DataError(f"data path {path} is compressed ({compressed[0]})", "decompress the files, or write parquet")
    is_alone = len(files) == 1 and not expanded.is_dir()
    formats = {file: _format_of(file, is_alone) for file in files}
    records = {file: row_format for file, row_format in formats.items() if row_format is not None}
    if not records or (len(records) < len(files) and not any(row_format.is_table for row_format in records.values())):
        return files, PLAIN_TEXT
    examples = {row_format.name: file.name for file, row_format in records.items()}
    if len(examples) > 1:
        raise DataError(
            f"data path {path} mixes {' and '.join(examples)} files ({', '.join(examples.values())})",
            "name one kind by a glob such as data.path=DIR/*.parquet, or each kind as one of data.sources",
        )
    return list(records), next(iter(records.values()))


def _datasets_split(path: str) -> str:
    """The folder of the train split, if `path` is a `datasets` folder of several splits; else `path`."""
    listing = Path(path).expanduser() / "dataset_dict.json"
    if not listing.is_file():
        return path
    try:
        splits = list(map(str, parse_json(read_regular(listing))["splits"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{listing} is damaged: {error}", "name a split: data.path=FOLDER/SPLIT") from error
    if "train" not in splits:
        raise DataError(f"data path {path} has the splits {', '.join(splits)}", "name one: data.path=FOLDER/SPLIT")
    return str(listing.parent / "train")


def _format_of(file: TextFile, is_alone: bool) -> RowFormat | None:
    name = file.name.lower()
    for row_format in FORMATS:
        if name.endswith((*row_format.suffixes, *(row_format.suffixes_alone if is_alone else ()))):
            return row_format
    return None


def find_text_files(path: str | None) -> list[TextFile]:
    """Candidate files of a text corpus, sorted by relative path: a file, a directory's files, or a glob's.

    None means the source of Python's standard library. Hidden files and `.bin` files are left out; `is_text` decides
    whether a file really is text when it is read.

    Raises:
        DataError: the path does not exist, cannot be read, or holds no file.
    """
    if path is None:
        root = sysconfig.get_path("stdlib")
        files = [file for file in walk(root) if file.name.endswith(".py")]
        if not files:
            raise DataError(
                f"this Python has no source files of its library in {root}", "set data.path to text of your own"
            )
        return files
    files = find_files(path)
    _refuse_records(path, files, os.path.isdir(os.path.expanduser(path)))
    return files


def _refuse_records(path: str, files: list[TextFile], is_directory: bool) -> None:
    """Refuse records: training would use their bytes, quotes and field names included, or skip them as binary.

    A directory of text may also hold some JSON lines.
    """
    formats = {file.name: _format_of(file, is_alone=False) for file in files}
    records = {name: row_format for name, row_format in formats.items() if row_format is not None}
    has_tables = any(row_format.is_table for row_format in records.values())
    if records and (has_tables or not is_directory or len(records) == len(files)):
        raise DataError(
            f"data path {path} holds records, not text ({next(iter(records))}), and the run has no tokenizer to read "
            "them with",
            "set data.tokenizer to a tokenizer.json or its folder, or write the token ids to a .bin file",
        )
