"""Arrow: the stream that `datasets` writes, and the file format (feather). A piece is some record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ..listing import TextFile
from .format import Piece, reading
from .tabular import TableFormat, existing, pyarrow_module


class Arrow(TableFormat):
    name, suffixes = "arrow", (".arrow", ".feather")

    def schema(self, path: str) -> Any:
        pyarrow = pyarrow_module("pyarrow", path)
        with reading(path), pyarrow.memory_map(path) as source:
            return _reader(pyarrow, path, source)[0].schema

    def cut(self, file: TextFile, n_bytes: int, split_groups: bool) -> list[Piece]:
        pieces, start, size = [], 0, 0
        n_batches = 0
        for batch in _all_batches(file.path):
            n_batches += 1
            size += batch.nbytes
            if size >= self.piece_bytes:
                pieces.append(Piece(file.path, self, start, n_batches, size))
                start, size = n_batches, 0
        return [*pieces, Piece(file.path, self, start, n_batches, size)] if start < n_batches else pieces

    def batches(self, piece: Piece, columns: list[str] | None) -> Iterator[Any]:
        yield from islice(_all_batches(piece.path, columns), piece.start, piece.stop)

    def count_rows(self, path: str, pieces: Sequence[Piece]) -> list[int]:
        batch_rows = [batch.num_rows for batch in _all_batches(path)]
        return [sum(batch_rows[piece.start : piece.stop]) for piece in pieces]


def _all_batches(path: str, columns: list[str] | None = None) -> Iterator[Any]:
    pyarrow = pyarrow_module("pyarrow", path)
    with pyarrow.memory_map(path) as source:
        reader, batches = _reader(pyarrow, path, source)
        selected = existing(reader.schema.names, columns)
        for batch in batches:
            batch = batch if selected is None else batch.select(selected)
            batch.validate(full=True)  # pyarrow follows damaged offsets beyond the file otherwise
            yield batch


def _reader(pyarrow: Any, path: str, source: Any) -> tuple[Any, Iterator[Any]]:
    with open(path, "rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    if not is_file:
        reader = pyarrow.ipc.open_stream(source)
        return reader, iter(reader)
    reader = pyarrow.ipc.open_file(source)
    return reader, (reader.get_batch(i) for i in range(reader.num_record_batches))
