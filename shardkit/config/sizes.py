"""Sizes as people write them in configs."""

from __future__ import annotations

import re
from collections.abc import Mapping

BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# As makers of memory and Slurm write it: 80GB is 80·10⁹ bytes, 24G is 24·2³⁰.
ANY = {**BINARY, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str, units: Mapping[str, int] = BINARY) -> int:
    """`1.5GiB` → 1610612736.

    Raises:
        ValueError: not a positive number and one of `units` (in a config GB could mean 10^9 or 2^30: binary only).
    """
    found = _SIZE.fullmatch(text)
    n_bytes = round(float(found[1]) * units.get(found[2], 0)) if found else 0
    if n_bytes < 1:
        raise ValueError(f"{text!r} is not a size")
    return n_bytes
