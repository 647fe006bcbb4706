"""Memory that grows from step to step is told, and nothing else is: from the ledger's figures at its gathers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardkit.memory.ledger import GATHERS, Growth
from shardkit.memory.probe import page_locked
from shardkit.memory.rows import DeviceMemory, PhaseMemory, RankRow
from shardkit.memory.table import render_table
from tests.memory.samples import MIB, gpu_row
from tests.oom.test_postmortem import MESSAGE, post_mortem

TOTAL = 80 << 30


def row(allocated: float, within: float) -> RankRow:
    """A row at a step's end; within the step it took more."""
    peak = int(allocated + within)
    forward = PhaseMemory(int(allocated), peak, peak, peak, 0, 0)
    return replace(
        gpu_row(0), device_mem=DeviceMemory(int(allocated), peak, peak, peak, TOTAL), phases={"forward": forward}
    )


def loop(seed: int) -> tuple[float, float | None]:
    """Bytes a step that a random loop leaves behind, and what was told after 30 gathers."""
    draw = random.Random(seed)
    interval, state = draw.choice([1, 5, 10]), draw.uniform(200, 4000) * MIB
    activations = state * draw.uniform(0.3, 4)
    leak = draw.choice([0.0, draw.uniform(0.01, 0.2) * (state + activations)])
    lengths = draw.choice(["equal", "any"] if leak else ["equal", "any", "longer"])
    held = draw.uniform(0, 0.1) * activations if interval > 1 or not leak else 0.0  # the last batch's outputs
    warm_until, cache = draw.randint(3, 40), draw.choice([0.0, 0.1 * state])
    growth = Growth()
    for step in range(1, 30 * interval + 1):
        length = {"equal": 1.0, "any": draw.uniform(0.5, 1), "longer": 0.3 + 0.7 * step / (30 * interval)}[lengths]
        if step <= 2 or step % interval == 0:
            kept = leak * step + cache * min(1, 1 - 0.5 ** (8 * step / warm_until))
            growth.add(step, row(state + kept + held * length, activations * length))
    return leak, growth.bytes_a_step


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_loops_grow_or_do_not(first: int) -> None:
    for seed in range(first, first + 100):
        leak, told = loop(seed)
        assert bool(told) == bool(leak), f"seed {seed}: {leak} {told}"
        assert told is None or told == pytest.approx(leak, rel=0.2), f"seed {seed}"


def test_the_table_and_the_post_mortem_say_how_much_and_advise_no_setting(tmp_path: Path) -> None:
    mortem = post_mortem(tmp_path)
    steady = mortem._ledger.row()
    growing = replace(steady, device_mem=DeviceMemory(30 << 30, 40 << 30, 40 << 30, 40 << 30, TOTAL, 40 << 30, 2 << 30))
    assert "keeps 2.00 GiB more after each step and is full in 20 steps" in render_table([growing])
    assert "grows" not in render_table([steady])
    mortem._ledger.row = lambda: growing
    explained = mortem.explain(torch.OutOfMemoryError(MESSAGE))
    assert explained is not None and "grew by 2.00 GiB in each step" in explained.cause
    assert "shardkit rehearse" in explained.fix and "set " not in explained.fix
    named = replace(growing, device_mem=replace(growing.device_mem, growth_line="train.py:7: kept.append(loss)"))
    assert "train.py:7: kept.append(loss)" in render_table([named])
    mortem._ledger.row = lambda: named
    explained = mortem.explain(torch.OutOfMemoryError(MESSAGE))
    assert explained is not None and "train.py:7: kept.append(loss)" in explained.fix


def test_a_gather_needs_enough_others_before_it() -> None:
    growth = Growth()
    for gather in range(GATHERS + 1):
        assert growth.bytes_a_step is None
        growth.add(gather + 2, row(1000 * MIB + 100 * MIB * gather, 100 * MIB))
    assert growth.bytes_a_step == 100 * MIB


def test_pinned_memory_is_rounded_as_torch_was_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert page_locked(96 * MIB) == 128 * MIB
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,pinned_max_round_threshold_mb:64")
    assert page_locked(96 * MIB) == 96 * MIB and page_locked(48 * MIB) == 64 * MIB
