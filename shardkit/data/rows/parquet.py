"""Parquet: a piece is one row group, or a part of a large one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from ..listing import TextFile
from .format import Piece, damaged, reading
from .tabular import TableFormat, TableRows, existing, pyarrow_module, to_table

BATCH_ROWS, BATCH_BYTES = 1024, 1 << 22
"""Most rows that are decoded together, and about how many bytes."""
_BUFFER_BYTES = 1 << 18


class Parquet(TableFormat):
    name, suffixes = "parquet", (".parquet",)
    part_bytes: ClassVar[int] = 1 << 25
    part_rows: ClassVar[int] = 1 << 16
    """Most bytes and rows of a part of a row group, as a reader holds several parts."""

    def schema(self, path: str) -> Any:
        return _open(path).schema_arrow

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        pieces = []
        metadata = _open(file.path).metadata
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
        return read_groups(piece.path, range(piece.start, piece.stop), columns)

    def count_rows(self, path: str, pieces: Sequence[Piece]) -> list[int]:
        metadata = _open(path).metadata
        return [metadata.row_group(piece.start).num_rows if piece.n_rows is None else piece.n_rows for piece in pieces]

    def footer_bytes(self, path: str) -> int:
        return int(_open(path).metadata.serialized_size) + 8  # with the footer's length and the magic number


def _open(path: str) -> Any:
    """An open parquet file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    parquet = pyarrow_module("pyarrow.parquet", path)
    with reading(path):
        # Without a buffer pyarrow reads a whole column of a row group at once, however few rows are asked for.
        return parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def read_groups(path: str, groups: Sequence[int], columns: list[str] | None) -> Iterator[Any]:
    """The rows of some row groups in small record batches; memory does not grow with the groups.

    Args:
        columns: names of the columns to read, of which the file may lack some; None = all.
    """
    file = _open(path)
    n_rows = sum(file.metadata.row_group(group).num_rows for group in groups)
    n_bytes = sum(file.metadata.row_group(group).total_byte_size for group in groups)
    batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES * n_rows // max(n_bytes, 1)))
    selected = existing(file.schema_arrow.names, columns)
    yield from file.iter_batches(batch_rows, row_groups=list(groups), columns=selected, use_threads=False)


class GroupReader:
    """Reads a row group from its start to its end, in parts of any number of rows.

    Attributes:
        position: rows that were read so far.
    """

    def __init__(self, path: str, group: int, columns: list[str] | None) -> None:
        self.path, self.position = path, 0
        self._batches = read_groups(path, [group], columns)
        self._remainder: Any = None

    def read(self, n_rows: int) -> TableRows:
        """The next `n_rows` rows.

        Raises:
            DataError: the file has fewer rows, or is damaged.
        """
        parts, missing = [], n_rows
        while missing:
            batch = self._remainder if self._remainder is not None else next(self._batches, None)
            if batch is None:
                raise damaged(self.path, ValueError(f"a row group has no more than {self.position} rows"))
            parts.append(batch.slice(0, missing))
            self._remainder = batch.slice(missing) if batch.num_rows > missing else None
            missing -= parts[-1].num_rows
        self.position += n_rows
        return TableRows(to_table(parts, self.path), self.path)
