"""The interface of a row format, and the pieces of its files."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

from ...errors import LONGEST, DataError, gib, one_line
from ...files.bounded import LIMITS, beyond, memory_limit
from ..listing import TextFile


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, with the reason; `row` is its number within its piece, from 0."""

    row: int
    reason: str


@dataclass(frozen=True)
class Piece:
    """The part of a file that one worker reads: bytes, row groups or record batches [start, stop).

    Attributes:
        size: bytes of the piece.
        ends: False for a piece of a text file whose document continues in the next piece.
        first_row: the first row of a piece that is a part of one row group.
        n_rows: the rows of such a part; None for all other pieces.
    """

    path: str
    format: RowFormat
    start: int
    stop: int
    size: int
    ends: bool = True
    first_row: int = 0
    n_rows: int | None = None

    @property
    def follows_previous(self) -> bool:
        """Whether the previous piece is of the same row group, which can only be read from its start."""
        return self.first_row > 0


class LoadedRows(Protocol):
    """The rows of a piece in memory, not parsed yet."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[int, Any]:
        """A row's number within the piece, and the row as a dict or a `BadRow`."""
        ...


class RowFormat(ABC):
    """Reads one format of files with rows. Its instances have no state.

    Methods may raise any OSError and ValueError; the functions of `rows.pieces` turn these into a `DataError`.

    Attributes:
        name: the format's name in messages and in the keys of caches.
        suffixes: suffixes of files in this format, in lower case.
        suffixes_alone: further suffixes, of files that are named one by one.
        is_table: whether a single file of this format makes its whole folder one of records.
        has_columns: False for plain text.
        continues: whether a row can continue in the next piece.
        unit: the word for what a piece's `start` counts.
        piece_bytes: about how many bytes a piece has.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    suffixes_alone: ClassVar[tuple[str, ...]] = ()
    is_table: ClassVar[bool] = False
    has_columns: ClassVar[bool] = True
    continues: ClassVar[bool] = False
    unit: ClassVar[str] = "group"
    piece_bytes: ClassVar[int] = 1 << 23

    def encoded_piece_bytes(self, files: Sequence[TextFile]) -> int | None:
        """Bytes of a piece that is tokenised beforehand, where they differ from `piece_bytes`."""
        return None

    @abstractmethod
    def columns(self, files: Sequence[TextFile], candidates: set[str]) -> list[str]:
        """The columns that any row of the files has; formats that must search for columns search for `wanted` alone."""

    @abstractmethod
    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        """The pieces of a file, in order; none if the file is to be skipped.

        Args:
            n_bytes: bytes of a piece, where the format can choose them.
            split_groups: cut large row groups into parts.
        """

    @abstractmethod
    def rows(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        """The rows in order: dicts, None for a blank line, a `BadRow`, or a string that is the whole piece.

        Args:
            columns: the columns to read, of which the file may lack some; None = all.
        """

    @abstractmethod
    def load(self, piece: Piece, columns: list[str] | None) -> LoadedRows:
        """All rows of the piece, for access by their index. Blank lines are left out."""

    @abstractmethod
    def survey(self, pieces: Sequence[Piece], digest: hashlib.blake2b) -> Iterator[int]:
        """The number of rows of each piece, blank lines left out; adds the contents to the digest on the way."""


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Read a part of a file within the memory limit for rows; errors of the format's library name the file.

    Raises:
        DataError: the file cannot be read, is damaged, or takes more memory than a file of its size may.
    """
    try:
        n_bytes, _ = LIMITS["data file"].at(os.stat(path).st_size)
        with memory_limit(n_bytes, beyond(path, "data file", f"{gib(n_bytes)} of memory", DataError)):
            yield  # pyarrow's ArrowMemoryError is a MemoryError
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise damaged(path, error) from error


def line_ranges(file: TextFile, n_bytes: int) -> list[tuple[int, int]]:
    """Ranges of about `n_bytes` that end with a line and cover the file; longer lines make longer ranges."""
    cuts = [0]
    with open(file.path, "rb") as stream:
        while (target := cuts[-1] + n_bytes) < file.size:
            stream.seek(target)
            stream.readline()
            cuts.append(min(stream.tell(), file.size))
    if cuts[-1] != file.size or len(cuts) == 1:
        cuts.append(file.size)
    return list(pairwise(cuts))


def read_range(piece: Piece) -> bytes:
    with open(piece.path, "rb") as stream:
        stream.seek(piece.start)
        return stream.read(piece.stop - piece.start)


def damaged(path: str, error: Exception) -> DataError:
    """The error for a file that its format's library cannot read."""
    reason = one_line(error, LONGEST) or type(error).__name__
    return DataError(f"{path} is damaged or cut short: {reason}", "copy or write the file again")
