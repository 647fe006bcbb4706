"""Formats of lines: a piece is a range of bytes that ends with a line."""

from __future__ import annotations

from itertools import pairwise

from ..listing import TextFile
from .format import Piece


def line_ranges(file: TextFile, n_bytes: int) -> list[tuple[int, int]]:
    """Ranges of about `n_bytes` that cover the file; longer lines make longer ranges."""
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
    """The bytes of the piece."""
    with open(piece.path, "rb") as stream:
        stream.seek(piece.start)
        return stream.read(piece.stop - piece.start)
