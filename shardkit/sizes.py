"""Sizes as people write them in configs."""

from __future__ import annotations

import re

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB)\s*")


def parse_bytes(text: str) -> int:
    """`1.5GiB` → 1610612736.

    Raises:
        ValueError: not a positive number and one of KiB, MiB, GiB, TiB (GB means 10^9 to some and 2^30 to others).
    """
    found = _SIZE.fullmatch(text)
    n_bytes = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if n_bytes < 1:
        raise ValueError(f"{text!r} is not a size")
    return n_bytes
