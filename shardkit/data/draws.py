"""Randomness that belongs to a sample: the same on every rank, in every worker, for every world size."""

from __future__ import annotations

import hashlib

import numpy as np


def generator_of(seed: int, *what: str | int) -> np.random.Generator:
    """A generator of its own for (seed, what), e.g. `generator_of(0, "crop", "train", index)`."""
    key = "\0".join(map(str, (seed, *what))).encode()
    return np.random.Generator(
        np.random.Philox(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little"))
    )
