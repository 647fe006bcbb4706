"""Bytes as people read them."""

from __future__ import annotations


def gib(n_bytes: float) -> str:
    """Bytes as GiB, or MiB below a tenth of a GiB."""
    if abs(n_bytes) < 0.1 * 2**30:
        return f"{n_bytes / 2**20:.1f} MiB"
    return f"{n_bytes / 2**30:.2f} GiB"
