"""Five lines around a loop that stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardkit.memory import MemoryLedger, read_jsonl


class Loop:
    """Somebody's training loop with accumulation and an evaluation."""

    def __init__(self) -> None:
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(2):
                self.model(torch.ones(1, 64)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                self.model(torch.ones(1, 64))


def test_a_loop_is_accounted_without_changing_it(tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "memory.jsonl"
    ledger = MemoryLedger.from_env("cpu", interval=4)
    with ledger.watch(loop.model, loop.optimizer, path=path):
        loop.run(steps=10)
    records = list(read_jsonl(path))
    assert [step for step, _ in records] == [1, 2, 4, 8, 10]
    row = records[-2][1][0]
    assert row.state is not None
    n_params = 64 * 64 + 64
    assert [row.state[kind].device for kind in ("params", "grads", "optimizer")] == [
        4 * n_params, 4 * n_params, 8 * n_params + 8
    ]  # fmt: skip
    assert set(row.phases) == {"forward", "backward", "update"}
    assert row.step_time_s is not None
    assert 0 < row.step_time_s < 10
    assert "peak" in ledger.table()


def test_hooks_are_gone_afterwards_and_an_error_passes_through(tmp_path: Path) -> None:
    loop = Loop()
    ledger = MemoryLedger.from_env("cpu")
    with pytest.raises(RuntimeError, match="shapes"), ledger.watch(loop.model, loop.optimizer):
        loop.model(torch.ones(1, 3))
    assert ledger.open_phase is None
    asked = ledger.overhead_s
    loop.run(steps=1)
    assert ledger.overhead_s == asked


def test_the_last_step_is_gathered_once(tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "memory.jsonl"
    with MemoryLedger("cpu", interval=2).watch(loop.model, loop.optimizer, path=path):
        loop.run(steps=4)
    assert [step for step, _ in read_jsonl(path)] == [1, 2, 4]


def test_an_optimizer_is_needed() -> None:
    with pytest.raises(TypeError, match="at least one optimizer"):
        MemoryLedger("cpu").watch(nn.Linear(1, 1))
