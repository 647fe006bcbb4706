"""A step of shardkit waits no more for the device than the shortest hand-written loop, but for its loss."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import host_cost
from tests.emulated_cuda import needs_emulation
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.deepspeed, needs_emulation]

# TensorBoard's events are written every few seconds, all at once: some steps of a busy machine would have their calls.
SMALL = {"model.preset": "debug", "train.seq_len": 64, "logging.tensorboard": False}
LOSS = {"event_sync": 1}
"""The wait for the loss, which every step's record has."""
MORE_CALLS = {"zero2": 450}
"""Python functions that a step may call more than the hand-written loop, whose clipping walks through the modules."""


@pytest.mark.parametrize("engine", host_cost.ENGINES)
def test_a_step_waits_only_for_its_loss(engine: str, tmp_path: Any) -> None:
    tokens, folder = host_cost.write_tokens(tmp_path), str(tmp_path / "run")
    given: dict[str, Any] = {"engine": engine, "tokens": tokens, "folder": folder, "turns": 5, "changes": SMALL}
    arms = run_ranks(host_cost.ENGINES[engine], "benchmarks.host_cost:measured", gpu=True, **given)[0]
    ours, theirs = arms["shardkit"]["calls"], arms["hand-written"]["calls"]
    added = {name: ours.get(name, 0) - theirs.get(name, 0) for name in host_cost.WAITS}
    assert {name: n for name, n in added.items() if n > 0} == LOSS
    if engine == "zero2":  # DeepSpeed waits for its own norms once more for each group
        assert theirs["stream_sync"] and not ours.get("stream_sync") and not ours.get("copy_pageable")
    assert arms["shardkit"]["python_calls"] <= arms["hand-written"]["python_calls"] + MORE_CALLS.get(engine, 0)
    taken = ("malloc", "free", "mem_create", "mem_map", "host_alloc")
    assert [ours.get(name, 0) for name in taken] == [theirs.get(name, 0) for name in taken]
