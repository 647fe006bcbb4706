"""Generators go on where they were."""

from __future__ import annotations

import random

import numpy as np
import torch

from shardkit.checkpoint import rng

CPU = torch.device("cpu")


def draw() -> list[float]:
    # Gaussians too: Python and NumPy keep half of a pair back.
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())),
        float(torch.nn.functional.dropout(torch.ones(64)).sum()),
    ]  # fmt: skip


def test_restored_generators_repeat_what_they_drew() -> None:
    draw()
    states = rng.capture(CPU)
    first = [draw(), draw()]
    rng.restore(states, CPU)
    assert [draw(), draw()] == first


def test_reseeding_depends_on_rank_and_step_and_repeats() -> None:
    seen = []
    for rank, step in ((0, 10), (1, 10), (0, 11), (0, 10)):
        rng.reseed(5, rank, step)
        seen.append(tuple(draw()))
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3
