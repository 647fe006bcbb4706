"""Parquet and arrow files: schemas, batches, and parts of row groups. pyarrow is imported where it is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import DataError

BATCH_ROWS, BATCH_BYTES = 1024, 1 << 22
"""Most rows of a parquet file that are decoded together, and about how many bytes."""
_BUFFER_BYTES = 1 << 18


def parquet_file(path: str) -> Any:
    """An open parquet file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    parquet = _pyarrow("pyarrow.parquet", path)
    try:
        # Without a buffer pyarrow reads a whole column of a row group at once, however few rows are asked for.
        return parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def parquet_batches(path: str, groups: Sequence[int], columns: list[str] | None) -> Iterator[Any]:
    """The rows of some row groups in small record batches; memory does not grow with the groups.

    Args:
        columns: names of the columns to read, of which the file may lack some; None = all.
    """
    file = parquet_file(path)
    n_rows = sum(file.metadata.row_group(group).num_rows for group in groups)
    n_bytes = sum(file.metadata.row_group(group).total_byte_size for group in groups)
    n_together = max(1, min(BATCH_ROWS, BATCH_BYTES * n_rows // max(n_bytes, 1)))
    there = _existing(file.schema_arrow.names, columns)
    yield from file.iter_batches(n_together, row_groups=list(groups), columns=there, use_threads=False)


def arrow_batches(path: str, columns: list[str] | None = None) -> Iterator[Any]:
    """The record batches of an arrow file: the stream that `datasets` writes, or the file format (feather).

    Args:
        columns: names of the columns to give, of which the file may lack some; None = all.
    """
    pyarrow = _pyarrow("pyarrow", path)
    with pyarrow.memory_map(path) as source:
        reader, batches = _arrow_reader(pyarrow, path, source)
        there = _existing(reader.schema.names, columns)
        for batch in batches:
            yield batch if there is None else batch.select(there)


def _arrow_reader(pyarrow: Any, path: str, source: Any) -> tuple[Any, Iterator[Any]]:
    with open(path, "rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
    if not is_file:
        reader = pyarrow.ipc.open_stream(source)
        return reader, iter(reader)
    reader = pyarrow.ipc.open_file(source)
    return reader, (reader.get_batch(i) for i in range(reader.num_record_batches))


def schema(path: str, kind: str) -> Any:
    """The schema of a parquet or arrow file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    if kind == "parquet":
        return parquet_file(path).schema_arrow
    pyarrow = _pyarrow("pyarrow", path)
    try:
        with pyarrow.memory_map(path) as source:
            return _arrow_reader(pyarrow, path, source)[0].schema
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def to_table(batches: list[Any], path: str) -> Any:
    """Record batches of one schema as a table."""
    return _pyarrow("pyarrow", path).Table.from_batches(batches)


def to_dicts(rows: Any) -> list[dict[str, Any]]:
    """The rows of a batch or table as dicts; maps become dicts too, as objects of JSON do."""
    if any("map<" in str(kind) for kind in rows.schema.types):
        dicts: list[dict[str, Any]] = rows.to_pylist(maps_as_pydicts="strict")
        return dicts
    return rows.to_pylist()  # type: ignore[no-any-return]


def _existing(names: list[str], columns: list[str] | None) -> list[str] | None:
    return None if columns is None else [name for name in columns if name in names]


class GroupReader:
    """Reads a row group of a parquet file from its start to its end, so many rows at a time.

    Attributes:
        position: rows that were read or skipped.
    """

    def __init__(self, path: str, group: int, columns: list[str] | None) -> None:
        self.path, self.position = path, 0
        self._batches = parquet_batches(path, [group], columns)
        self._left: Any = None

    def read(self, n_rows: int) -> Any:
        """The next `n_rows` rows as a table.

        Raises:
            DataError: the file has fewer rows, or is damaged.
        """
        parts, missing = [], n_rows
        while missing:
            batch = self._left if self._left is not None else next(self._batches, None)
            if batch is None:
                raise damaged(self.path, ValueError(f"a row group has no more than {self.position} rows"))
            parts.append(batch.slice(0, missing))
            self._left = batch.slice(missing) if batch.num_rows > missing else None
            missing -= parts[-1].num_rows
        self.position += n_rows
        return to_table(parts, self.path)


def damaged(path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"{path} is damaged or cut short: {reason}", "copy or write the file again")


def _pyarrow(module: str, path: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        cause = f"{path} needs pyarrow, which does not import: {error}"
        raise DataError(cause, "pip install shardkit[finetune]") from error
