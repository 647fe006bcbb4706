"""Files of rows, of any format: cut into pieces, counted and read. Errors of the formats become a `DataError`."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import DataError
from ..listing import TextFile, unreadable
from .format import LoadedRows, Piece, RowFormat, damaged, reading
from .parquet import GroupReader


def cut(
    files: Sequence[TextFile], row_format: RowFormat, n_bytes: int | None = None, split_groups: bool = False
) -> list[Piece]:
    """The pieces of all files, in order. Binary files among text are left out.

    Args:
        n_bytes: bytes of a piece of text or JSON lines; None = the format's usual.
        split_groups: cut large row groups of parquet into parts, which must be read in order; see `PieceReader`.

    Raises:
        DataError: a file cannot be read, is cut short, or is an array of JSON instead of lines.
    """
    pieces: list[Piece] = []
    for file in files:
        with reading(file.path):
            try:
                pieces += row_format.cut(file, n_bytes or row_format.piece_bytes, split_groups)
            except OSError as error:
                if error.errno is None:  # pyarrow's
                    raise
                raise unreadable(file.path, error) from error
    return pieces


def rows(piece: Piece, columns: list[str] | None = None) -> Iterator[Any]:
    """The rows of a piece in order: a string (text: all of the piece), a dict, or a `BadRow`.

    Args:
        columns: the columns of a table to read; None = all.

    Raises:
        DataError: the file cannot be read, or is damaged.
    """
    try:
        yield from piece.format.rows(piece, columns)
    except (OSError, ValueError) as error:
        raise damaged(piece.path, error) from error


def survey(pieces: Sequence[Piece]) -> tuple[list[int], str]:
    """The number of rows of each piece (blank lines are none), and a digest of the contents.

    The digest covers all of JSON lines, which are read for it anyway. Of a table's file it covers blocks at even
    distances, the first and the last bytes among them, and of parquet also the footer.

    Raises:
        DataError: a file cannot be read, or is damaged.
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
        self._loaded: OrderedDict[int, LoadedRows] = OrderedDict()
        self._group_readers: OrderedDict[tuple[str, int], GroupReader] = OrderedDict()

    def row(self, number: int, index: int) -> tuple[int, Any]:
        """A row of a piece: its number within the piece, and a dict or a `BadRow`.

        Raises:
            DataError: the file cannot be read, or is damaged.
        """
        if number not in self._loaded:
            piece = self._pieces[number]
            if piece.n_rows is not None:
                self._load_parts(number)
            else:
                with reading(piece.path):
                    self._hold(number, piece.format.load(piece, self._columns))
        self._loaded.move_to_end(number)
        return self._loaded[number].row(index)

    def _hold(self, number: int, loaded: LoadedRows) -> None:
        self._loaded[number] = loaded
        if len(self._loaded) > self._window:
            self._loaded.popitem(last=False)

    def _load_parts(self, number: int) -> None:
        """Read the part `number` of a row group, and the parts before it that its reader has not passed yet."""
        part = self._pieces[number]
        group = part.path, part.start
        reader = self._group_readers.pop(group, None)
        if reader is None or reader.position > part.first_row:
            reader = GroupReader(part.path, part.start, self._columns)
        self._group_readers[group] = reader
        if len(self._group_readers) > self._window:
            self._group_readers.popitem(last=False)
        next_number = number
        while self._pieces[next_number].first_row > reader.position:
            next_number -= 1
        try:
            with reading(part.path):
                for passed in range(next_number, number + 1):
                    loaded = reader.read(self._pieces[passed].n_rows or 0)
                    if passed > number - self._window:
                        self._hold(passed, loaded)
        except DataError:
            del self._group_readers[group]
            raise
