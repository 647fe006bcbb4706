"""Store this rank's random generators as plain integer tensors, and restore them."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """State of Python's, NumPy's (legacy) and torch's generators, and of the device's; 1-D tensors on CPU."""
    version, words, gauss = random.getstate()
    python = [version, int(gauss is not None), _bits(gauss or 0.0), *words]
    state: Any = np.random.get_state(legacy=True)
    _, key, position, has_gauss, numpy_gauss = state
    numpy = [int(position), int(has_gauss), _bits(numpy_gauss), *key.tolist()]
    states = {
        "python": torch.tensor(python, dtype=torch.int64), "numpy": torch.tensor(numpy, dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }  # fmt: skip
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the captured generators, except those that this process does not have."""
    if "python" in states:
        version, has_gauss, gauss, *words = states["python"].tolist()
        random.setstate((version, tuple(words), _from_bits(gauss) if has_gauss else None))
    if "numpy" in states:
        position, has_gauss, gauss, *key = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, _from_bits(gauss)))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def reseed(seed: int, rank: int, step: int) -> None:
    """Seed the generators of a run that resumes at another world size: a new sequence, not the first one again."""
    mixed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])
    torch.manual_seed(mixed >> 1)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
