"""The common part of Parquet and Arrow. pyarrow is imported where it is used."""

from __future__ import annotations

import hashlib
import importlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

from ...errors import DataError, importing
from ..listing import TextFile
from .format import LoadedRows, Piece, RowFormat, reading

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 12


class TableFormat(RowFormat):
    """A format whose rows pyarrow reads as record batches."""

    is_table = True

    @abstractmethod
    def schema(self, path: str) -> Any:
        """The schema of a file."""

    @abstractmethod
    def batches(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        """The record batches of a piece."""

    @abstractmethod
    def count_rows(self, path: str, pieces: Sequence[Piece]) -> list[int]:
        """The number of rows of each of a file's pieces."""

    def footer_bytes(self, path: str) -> int:
        """Bytes at the end of a file that are added to the digest in full."""
        return 0

    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        return list(dict.fromkeys(name for file in files for name in self.schema(file.path).names))

    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        batches = self.batches(piece, columns)
        while True:
            with reading(piece.path):
                batch = next(batches, None)
                dicts = [] if batch is None else to_dicts(batch)
            if batch is None:
                return
            yield from dicts

    def load(self, piece: Piece, columns: list[str] | None) -> LoadedRows:
        return TableRows(to_table(list(self.batches(piece, columns)), piece.path), piece.path)

    def survey(self, pieces: Sequence[Piece], digest: hashlib.blake2b) -> Iterator[int]:
        """See `RowFormat.survey`. The digest gets blocks of the file at even distances, and the footer."""
        for path, of_file in groupby(pieces, key=lambda piece: piece.path):
            digest.update(_sample_blocks(path, self.footer_bytes(path)))
            yield from self.count_rows(path, list(of_file))


class TableRows:
    """A table of pyarrow's, converted row by row.

    Lists, structs and dictionaries can be small in a table and large in Python: rows with them are converted within the
    memory limit of their file.
    """

    def __init__(self, table: Any, path: str) -> None:
        self._table, self._path = table, path
        self._can_grow = any("<" in str(kind) for kind in table.schema.types)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> tuple[int, Any]:
        with reading(self._path) if self._can_grow else nullcontext():
            return index, to_dicts(self._table.slice(index, 1))[0]


def to_table(batches: list[Any], path: str) -> Any:
    """Record batches of one schema as a table."""
    return pyarrow_module("pyarrow", path).Table.from_batches(batches)


def to_dicts(rows: Any) -> list[dict[str, Any]]:
    """The rows of a batch or table as dicts; maps become dicts too, as objects of JSON do."""
    if any("map<" in str(kind) for kind in rows.schema.types):
        dicts: list[dict[str, Any]] = rows.to_pylist(maps_as_pydicts="strict")
        return dicts
    return rows.to_pylist()  # type: ignore[no-any-return]


def existing(names: list[str], columns: list[str] | None) -> list[str] | None:
    """Those of `columns` that a file has; None = all."""
    return None if columns is None else [name for name in columns if name in names]


def pyarrow_module(module: str, path: str) -> Any:
    """A module of pyarrow.

    Raises:
        DataError: pyarrow is not installed; names the file that needs it.
    """
    with importing(f"{path} needs pyarrow", "pip install shardkit[finetune]", DataError):
        return importlib.import_module(module)


def _sample_blocks(path: str, footer_bytes: int) -> bytes:
    """Blocks of a file at even distances, its first and last bytes among them, and its last `footer_bytes`."""
    blocks = []
    with open(path, "rb") as stream:
        last_start = max(0, os.fstat(stream.fileno()).st_size - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            stream.seek(number * last_start // (_SAMPLES - 1))
            blocks.append(stream.read(_SAMPLE_BYTES))
        stream.seek(-footer_bytes, os.SEEK_END)
        blocks.append(stream.read(footer_bytes))
    return b"".join(blocks)
