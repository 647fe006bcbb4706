"""The settings of runs that benchmarks start are accepted by today's checks."""

from __future__ import annotations

import pytest

from benchmarks import auto, overhead, sft, sft_arms
from shardkit.config import capability
from shardkit.config.load import load_config, resolve_batch

RUNS = {
    **{engine: overhead.overrides(engine, "tokens.bin", "run", 4) for engine in overhead.ENGINES},
    **{
        f"sft, {tuned} {layout}": sft_arms.overrides(sft_arms.Setting(tuned, layout, "model", "chats.jsonl"), 4, "run")
        for tuned, layout in sft.SETTINGS
    },
    **{f"auto, {cell}": [*auto.BASE, *auto.settings_of(*cell)] for cell in auto.GRID[::7]},
}


@pytest.mark.parametrize("name", RUNS)
def test_settings_are_accepted_on_two_ranks(name: str) -> None:
    config = load_config(None, RUNS[name]).config
    capability.check(config, device="cpu", world_size=2, local_world_size=2)
    assert resolve_batch(config, 2) >= 1
